// What all screens share: changes that are sent to the server, what it answered, and the theme.
"use strict";
const ui = (() => {
  const SHOWN_MS = 8000;
  const LETTER_MS = 50; // more for a longer text, which is read more slowly
  const SIDE_EVERY_MS = 10000;
  const byId = (id) => document.getElementById(id);
  let hiding = null;

  // A tab that was opened from another one asks for its secret; no page of another origin hears this.
  const tabs = new BroadcastChannel("secret");
  tabs.addEventListener("message", ({ data }) => {
    const own = sessionStorage.getItem("secret");
    if (data.secret && !own) sessionStorage.setItem("secret", data.secret);
    if (!data.secret && own) tabs.postMessage({ secret: own });
  });
  if (!sessionStorage.getItem("secret")) tabs.postMessage({});

  // Shows a sentence for a while; `undo` puts a button next to it.
  function report(text, { undo } = {}) {
    const message = byId("message");
    message.replaceChildren(Object.assign(document.createElement("span"), { textContent: text }));
    if (undo) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Undo" });
      button.addEventListener("click", () => { message.hidden = true; undo(); });
      message.append(button);
    }
    message.hidden = false;
    clearTimeout(hiding);
    hiding = setTimeout(() => (message.hidden = true), SHOWN_MS + LETTER_MS * text.length);
  }

  // Sends a body to the server; resolves to what it answers, and shows why it refused otherwise.
  async function send(path, body, type = "application/octet-stream") {
    const headers = { "content-type": type, "x-diffsynth-secret": sessionStorage.getItem("secret") ?? "" };
    let answer;
    try {
      answer = await fetch(path, { method: "POST", headers, body });
    } catch (error) {
      report("The server does not answer; nothing was changed.");
      throw error;
    }
    const text = await answer.text();
    const isObject = answer.headers.get("content-type")?.startsWith("application/json");
    const given = isObject ? JSON.parse(text) : {};
    if (answer.ok) return given;
    const refusal = new Error(given.error ?? (text || `${answer.status} ${answer.statusText}`));
    refusal.answer = given;
    report(refusal.message);
    throw refusal;
  }

  const post = (path, given = {}) => send(path, JSON.stringify(given), "application/json");

  // Does what a button says, then shows the page as it is afterwards.
  async function press(button) {
    button.disabled = true;
    try {
      const { go, message } = await post(button.dataset.post, JSON.parse(button.dataset.body ?? "{}"));
      pressed = { name: button.ariaLabel, action: button.dataset.post.split("/").pop() };
      if (message) report(message);
      if (go) location.assign(go);
      else document.dispatchEvent(new Event("changed"));
    } catch {
      // It was shown.
    } finally {
      button.disabled = false;
    }
  }

  // A button that has another place on the new page keeps the focus, or one next to it where it is off there.
  let pressed = null;
  document.addEventListener("renewed", () => {
    if (pressed && document.activeElement === document.body) {
      const now = document.querySelector(`[aria-label="${CSS.escape(pressed.name)}"]`) ??
        document.querySelector(`[data-post$="/${CSS.escape(pressed.action)}"]`); // of the next one, where it is gone
      (now?.disabled ? now.parentElement.querySelector("button:enabled") : now)?.focus();
    }
    pressed = null;
  });

  // Runs that are chosen are shown side by side.
  const chosen = () => [...document.querySelectorAll("[name=run]:checked")].map(({ value }) => ["run", value]);
  const countChosen = () => byId("compare") && (byId("compare").disabled = chosen().length < 2);
  for (const event of ["change", "renewed"]) document.addEventListener(event, countChosen);
  countChosen(); // A browser keeps what was chosen when it loads the page again.
  byId("main").addEventListener("click", ({ target }) => {
    if (target.closest("#compare")) location.assign(`/compare?${new URLSearchParams(chosen())}`);
  });

  // Sends what is in a form, then goes to what it made.
  document.addEventListener("submit", async (event) => {
    const path = event.target.getAttribute("data-form"); // A field named dataset hides the property.
    if (!path) return;
    event.preventDefault();
    const fields = new FormData(event.target), zip = fields.get("zip"), button = event.submitter;
    fields.delete("zip");
    const given = Object.fromEntries(fields);
    if (button) button.disabled = true;
    if (zip?.size) report(`Sending ${zip.name}, ${Math.ceil(zip.size / 1e6).toLocaleString("en")} MB`);
    const sent = zip?.size ? send(`${path}/zip?${new URLSearchParams({ ...given, file: zip.name })}`, zip) : post(path, given);
    const made = await sent.catch(() => null); // It was shown.
    if (button) button.disabled = false;
    if (!made) return;
    if (made.message) sessionStorage.setItem("message", made.message);
    location.assign(made.go ?? "/");
  });
  // What the page before had to report.
  if (sessionStorage.getItem("message")) report(sessionStorage.getItem("message"));
  sessionStorage.removeItem("message");
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-post], [data-copy]");
    if (button?.dataset.post) press(button);
    if (button?.dataset.copy) navigator.clipboard.writeText(button.dataset.copy).then(() => report("Copied."));
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target)) menu.open = false;
    }
  });
  document.addEventListener("keydown", (event) => {
    const menu = event.key === "Escape" && document.querySelector("details.menu[open]");
    if (!menu) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });

  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    localStorage.setItem("theme", (root.dataset.theme = isDark ? "light" : "dark"));
  });

  // The numbers of the navigation and the memory of the GPU, which change by themselves on every page.
  const device = document.querySelector(".device progress");
  async function renewSide() {
    const answer = document.hidden ? null : await fetch("/side").catch(() => null);
    if (!answer?.ok) return;
    const { counts, gpu } = await answer.json();
    document.querySelectorAll(".nav .count").forEach((count, place) => (count.textContent = counts[place]));
    if (!device || !gpu) return;
    const { used, total, words } = gpu;
    Object.assign(device, { value: used, max: total, ariaLabel: `Memory of the GPU: ${words}` });
    byId("device-memory").textContent = words;
  }
  setInterval(renewSide, SIDE_EVERY_MS);
  document.addEventListener("changed", renewSide);

  return { post, send, report };
})();

// The form and the text of a config: what is typed is sent at each pause, and all is shown as the file then has it.
"use strict";
const configForm = (() => {
  const PAUSE_MS = 300;
  const INPUTS = ".field > :is(input, select, textarea), #text";
  const PARTS = ".field > :not(input, select, textarea), #own, #extends, #problems";
  const byId = (id) => document.getElementById(id);
  const waiting = new Map(); // what is typed and not yet sent, by its element
  let sent = document; // the page as the server sent it last
  let sending = Promise.resolve();

  // Fills the page from the one that was sent; an element that is typed in keeps what is typed.
  function show({ over = false } = {}) {
    const both = (selector) => {
      const now = sent.querySelectorAll(selector);
      return [...document.querySelectorAll(selector)].map((part, place) => [part, now[place]]);
    };
    const copied = (part) => document.importNode(part, true).childNodes;
    if (document.querySelectorAll(".field").length !== sent.querySelectorAll(".field").length) {
      byId("settings-panel").replaceChildren(...copied(sent.getElementById("settings-panel")));
      choose(document.querySelector('[role="tab"][aria-selected="true"]'));
    }
    for (const [field, now] of both(".field")) field.className = now.className;
    for (const [part, now] of both(PARTS)) {
      if (part.isEqualNode(now)) continue;
      part.replaceChildren(...copied(now));
      part.hidden = now.hidden;
    }
    for (const [input, now] of both(INPUTS)) {
      input.ariaInvalid = now.ariaInvalid;
      const isTyped = waiting.has(input) || input === document.activeElement;
      if (input.value === now.value || (isTyped && !over)) continue;
      if (input.matches("select")) input.replaceChildren(...copied(now));
      input.value = now.value;
    }
  }

  async function renew(options) {
    const answer = await fetch(location.pathname).catch(() => null);
    if (!answer?.ok) return;
    sent = new DOMParser().parseFromString(await answer.text(), "text/html");
    show(options);
    document.dispatchEvent(new Event("renewed"));
  }

  function goTo(line) {
    choose(byId("tab-text"));
    const text = byId("text");
    const lines = text.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    text.focus();
    text.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
  }

  // Sends one change after the other: each knows the text that the one before it made.
  function change(given, input) {
    sending = sending.then(async () => {
      const { hash } = sent.getElementById("text").dataset;
      const refusal = await ui.post("change", { hash, ...given }).then(() => null, (error) => error);
      if (!refusal || refusal.answer?.error) await renew({ over: Boolean(refusal) });
      // Where the server is gone, or the tab may only look, what is typed stays, and is sent with the next change.
      else if (input && !waiting.has(input)) waiting.set(input, null);
      if (!refusal) for (const [other, timer] of waiting) if (timer === null) send(other);
    });
    return sending;
  }

  function send(input) {
    if (!waiting.has(input)) return;
    clearTimeout(waiting.get(input));
    waiting.delete(input);
    change(input.id === "text" ? { text: input.value } : { key: input.id, value: input.value }, input);
  }

  byId("form").addEventListener("input", ({ target }) => {
    clearTimeout(waiting.get(target));
    waiting.set(target, setTimeout(() => send(target), target.matches("select") ? 0 : PAUSE_MS));
  });
  byId("form").addEventListener("change", ({ target }) => send(target));
  byId("form").addEventListener("focusout", ({ target }) => {
    if (!waiting.has(target)) sending.then(() => show());
  });
  document.addEventListener("click", ({ target }) => {
    const { line } = target.closest("[data-line]")?.dataset ?? {};
    if (line) goTo(Number(line));
    const field = target.closest(".reset")?.closest(".field");
    if (field) change({ key: field.dataset.key, value: null });
  });

  async function flush() {
    for (const input of [...waiting.keys()]) send(input);
    await sending;
  }

  byId("start").addEventListener("click", async ({ currentTarget }) => {
    currentTarget.disabled = true;
    await flush();
    const { go } = await ui.post("start").catch(() => ({})); // The reason was shown.
    byId("start").disabled = false;
    if (go) location.assign(go);
  });

  // Runs with several values: their names are shown before they are added.
  const variants = () => [1, 2]
    .map((number) => [byId(`v-key-${number}`).value, byId(`v-values-${number}`).value.trim()])
    .filter(([key, values]) => key && values)
    .map(([key, values]) => `${key}=${values}`);
  let naming = null;

  function showNames({ names = [], wrong = "" } = {}) {
    const items = names.map((name) => Object.assign(document.createElement("li"), { textContent: name }));
    byId("v-names").replaceChildren(...items);
    Object.assign(byId("v-wrong"), { textContent: wrong, hidden: !wrong });
    byId("v-add").disabled = !names.length;
    byId("v-add").lastElementChild.textContent = names.length ? `Add ${names.length} runs` : "Add runs";
  }

  byId("variants-form").addEventListener("input", () => {
    clearTimeout(naming);
    byId("v-add").disabled = true;
    naming = setTimeout(async () => {
      await flush();
      const settings = variants();
      const found = await ui.post("variants", { settings, do: "name" }).catch(() => ({})); // It was shown.
      if (String(settings) === String(variants())) showNames(found);
    }, PAUSE_MS);
  });

  byId("variants-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (byId("v-add").disabled) return;
    byId("v-add").disabled = true;
    await flush();
    const { compare } = await ui.post("variants", { settings: variants(), do: "add" }).catch(() => ({})); // It was shown.
    byId("v-add").disabled = false;
    if (!compare) return;
    byId("v-compare").href = compare;
    byId("v-added").hidden = false;
  });

  // Another tab or an editor may have changed the file while this tab was hidden.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) flush();
    else if (!waiting.size) sending = sending.then(() => renew());
  });

  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function choose(chosen) {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", tab === chosen);
      tab.tabIndex = tab === chosen ? 0 : -1;
    }
    const isText = chosen.id === "tab-text";
    byId("text-panel").hidden = !isText;
    byId("settings-panel").hidden = isText;
    byId("form").classList.toggle("differs", chosen.id === "tab-differs");
    if (chosen.id === "tab-differs" && byId("more")) byId("more").open = true;
  }
  for (const [place, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (!step) return;
      const next = tabs.at((place + step) % tabs.length);
      choose(next);
      next.focus();
    });
  }
  if (!byId("no-form").hidden) choose(byId("tab-text"));
  return { change, text: () => sent.getElementById("text").value };
})();

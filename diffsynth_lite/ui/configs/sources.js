// The data sets of a config that trains on several. The rows write the field data.sources, whose text is sent as any
// other field's; the server says below the field what its entries are, each setting as yaml on one line.
"use strict";
(() => {
  const SINGLE = ["path", "trigger", "repeats", "preserve"]; // moved into the first entry
  const NAMES = { path: "Folder", trigger: "Trigger", repeats: "Repeats", preserve: "Preserve" };
  const byId = (id) => document.getElementById(id);
  const panel = byId("settings-panel");
  const SETTLED_MS = 2000; // after which the answers to all that was written are there
  let entries = [], settling = null;

  const plain = (raw = "") => (raw.startsWith('"') ? JSON.parse(raw) : raw === "null" ? "" : raw);
  const keyed = (name) => (/^\w+$/.test(name) ? name : JSON.stringify(name));
  const meant = (all) => JSON.stringify(all.map((entry) => Object.entries(entry).map(([name, raw]) => [name, plain(raw)])));
  const written = (entry) => `{${Object.entries(entry).map(([name, raw]) => `${keyed(name)}: ${raw}`).join(", ")}}`;

  function type(key, text) {
    byId(key).value = text;
    byId(key).dispatchEvent(new Event("input", { bubbles: true }));
  }

  function row(entry, place) {
    const made = byId("source").content.firstElementChild.cloneNode(true), name = `data set ${place + 1}`;
    made.setAttribute("aria-label", `Data set ${place + 1}`);
    for (const input of made.querySelectorAll("input")) {
      const { setting } = input.dataset, value = plain(entry[setting]);
      input.setAttribute("aria-label", `${NAMES[setting]} of ${name}`);
      if (setting === "preserve") input.checked = value === "true";
      else input.value = value;
      input.addEventListener("input", () => {
        const text = input.value.trim(), isText = ["path", "trigger"].includes(setting);
        if (setting === "preserve" ? input.checked : text) {
          entry[setting] = setting === "preserve" ? "true" : isText ? JSON.stringify(text) : text;
        } else delete entry[setting];
        write();
      });
    }
    const remove = made.querySelector("button");
    remove.setAttribute("aria-label", `Take out ${name}`);
    remove.addEventListener("click", () => {
      entries.splice(place, 1);
      write();
      render();
      byId("add-source").focus();
    });
    return made;
  }

  function render() {
    for (const old of byId("sources").querySelectorAll('[role="group"]')) old.remove();
    byId("add-source").parentElement.before(...entries.map(row));
    byId("add-source").lastElementChild.textContent = entries.length ? "Add a data set" : "Several data sets";
  }

  function write() {
    clearTimeout(settling);
    settling = setTimeout(() => { settling = null; take(); }, SETTLED_MS);
    type("data.sources", entries.length ? `[${entries.map(written).join(", ")}]` : "");
  }

  // Takes over what the file has, unless it is what these rows wrote.
  function take() {
    if (settling || !byId("source-entries") || !byId("sources")) return;
    const given = JSON.parse(byId("source-entries").textContent);
    const isShown = byId("sources").querySelectorAll('[role="group"]').length === entries.length;
    if (isShown && meant(given) === meant(entries)) return;
    entries = given;
    render();
  }

  function add() {
    const sets = JSON.parse(byId("sources").dataset.sets);
    if (!entries.length) {
      const own = SINGLE.filter((name) => !["", "1", "false"].includes(byId(`data.${name}`).value));
      entries = [Object.fromEntries(own.map((name) => {
        const { value } = byId(`data.${name}`);
        return [name, ["path", "trigger"].includes(name) ? JSON.stringify(value) : value];
      }))];
      for (const name of own) {
        const reset = byId(`data.${name}`).closest(".field").querySelector(".reset");
        if (!reset.hidden && reset.title.endsWith(": nothing")) reset.click();
        else type(`data.${name}`, { repeats: "1", preserve: "false" }[name] ?? "");
      }
    }
    const used = entries.map(({ path }) => plain(path));
    entries.push({ path: JSON.stringify(sets.find((each) => !used.includes(each)) ?? "data/") });
    write();
    render();
    byId("sources").querySelector('[role="group"]:nth-last-of-type(2) input')?.focus();
  }

  if (!panel) return;
  panel.addEventListener("click", ({ target }) => { if (target.closest("#add-source")) add(); });
  // The form sends what is typed into its own fields; these rows are none.
  for (const kind of ["input", "change"]) panel.addEventListener(kind, (event) => {
    if (event.target.closest("#sources")) event.stopPropagation();
  });
  new MutationObserver(take).observe(panel, { childList: true, subtree: true, characterData: true });
  take();
})();

// New run: which recipes fit the chosen card, and the choices that make a config.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const chosen = (name) => document.querySelector(`[name="${name}"]:checked`)?.value ?? "";
  // As a config is named: a data set that is elsewhere may have a space in its name.
  const clean = (name) =>
    name.replace(/[^A-Za-z0-9._-]+/g, "_").replace(/^[^A-Za-z0-9]+/, "").slice(0, 64).replace(/\.+$/, "");
  let isNamed = byId("name").value !== ""; // as that of a copy

  function showName() {
    const stem = chosen("recipe").replace(/(_lora)?\.yaml$/, "");
    const data = chosen("data") || byId("dataset")?.value.trim().split("/").pop();
    if (!isNamed) byId("name").value = clean([data, stem].filter(Boolean).join("_"));
    byId("file").textContent = byId("name").value || "NAME";
  }

  // The chosen recipe stays in sight, so that nobody makes a config of one that is hidden.
  function filter() {
    const words = byId("filter").value.toLowerCase().split(/\s+/);
    for (const row of document.querySelectorAll("tbody tr")) {
      const isKind = !chosen("kind") || row.dataset.kind === chosen("kind");
      const isFound = isKind && words.every((word) => row.textContent.toLowerCase().includes(word));
      row.hidden = !isFound && !row.querySelector("input").checked;
    }
  }

  // The recipes for another card, those that fit it first.
  async function fit() {
    const address = new URL(location);
    address.searchParams.set("gpu", byId("gpu").value);
    const answer = await fetch(address).catch(() => null);
    if (!answer?.ok) return;
    const kept = chosen("recipe");
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("tbody").replaceWith(page.querySelector("tbody"));
    byId(kept).checked = true;
    filter();
  }

  document.addEventListener("change", ({ target }) => {
    if (target.id === "gpu") fit();
    if (["kind", "recipe"].includes(target.name)) filter();
    showName();
  });
  byId("filter")?.addEventListener("input", filter);
  byId("dataset")?.addEventListener("input", () => { byId("of-hub").checked = true; showName(); });
  byId("name").addEventListener("input", () => {
    isNamed = byId("name").value !== "";
    byId("file").textContent = byId("name").value || "NAME";
  });
  showName();
})();

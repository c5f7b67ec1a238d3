// New run: which recipes fit the chosen card, and the choices that make a config.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const chosen = (name) => document.querySelector(`[name="${name}"]:checked`)?.value ?? "";
  let isNamed = byId("name").value !== ""; // as that of a copy

  function showName() {
    const stem = chosen("recipe").replace(/(_lora)?\.yaml$/, "");
    if (!isNamed) byId("name").value = [chosen("data") || byId("dataset")?.value.trim().split("/").pop(), stem].filter(Boolean).join("_").slice(0, 64);
    byId("file").textContent = byId("name").value || "NAME";
  }

  function filter() {
    const words = byId("filter").value.toLowerCase().split(/\s+/);
    for (const row of document.querySelectorAll("tbody tr")) {
      const isKind = !chosen("kind") || row.dataset.kind === chosen("kind");
      row.hidden = !isKind || !words.every((word) => row.textContent.toLowerCase().includes(word));
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
    if (target.name === "kind") filter();
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

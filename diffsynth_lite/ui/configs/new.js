// New run: which recipes fit the chosen card, and the choices that make a config.
"use strict";
(() => {
  const ORDER = ["full", "half", "quarter", "none", "info"]; // what fits the card comes first
  const byId = (id) => document.getElementById(id);
  const { source } = JSON.parse(byId("data").textContent);
  const chosen = (name) => document.querySelector(`[name="${name}"]:checked`)?.value ?? "";
  const isCopy = Object.keys(source).length > 0;
  let isNamed = isCopy;

  function showName() {
    const stem = chosen("recipe").replace(/(_lora)?\.yaml$/, "");
    if (!isNamed) byId("name").value = [chosen("data"), stem].filter(Boolean).join("_").slice(0, 64);
    byId("file").textContent = byId("name").value || "NAME";
  }

  function filter() {
    const words = byId("filter").value.toLowerCase().split(/\s+/);
    for (const row of document.querySelectorAll("tbody tr")) {
      const isKind = !chosen("kind") || row.dataset.kind === chosen("kind");
      row.hidden = !isKind || !words.every((word) => row.textContent.toLowerCase().includes(word));
    }
  }

  async function fit() {
    const answer = await fetch(`/configs/fits?gpu=${encodeURIComponent(byId("gpu").value)}`);
    if (!answer.ok) return;
    for (const [recipe, { words, symbol, state, needs }] of Object.entries(await answer.json())) {
      const cell = document.querySelector(`[name="recipe"][value="${recipe}"]`).closest("tr").querySelector(".fit");
      const pill = cell.querySelector(".pill");
      pill.className = `pill ${state}`;
      pill.lastElementChild.textContent = words;
      pill.querySelector("use").setAttribute("href", `#i-${symbol}`);
      cell.querySelector(".needs").textContent = needs;
      cell.parentElement.dataset.order = ORDER.indexOf(symbol);
    }
    const table = document.querySelector("tbody");
    table.append(...[...table.rows].sort((one, other) => one.dataset.order - other.dataset.order));
  }

  document.addEventListener("change", ({ target }) => {
    if (target.id === "gpu") fit();
    if (target.name === "kind") filter();
    showName();
  });
  byId("filter")?.addEventListener("input", filter);
  byId("name").addEventListener("input", () => {
    isNamed = byId("name").value !== "";
    byId("file").textContent = byId("name").value || "NAME";
  });
  byId("make").addEventListener("submit", async (event) => {
    event.preventDefault();
    const name = byId("name").value;
    const choices = { data: chosen("data"), recipe: chosen("recipe"), goal: chosen("goal"), gpu: byId("gpu")?.value };
    try {
      location.assign((await ui.post("/configs", { name, ...(isCopy ? source : choices) })).go);
    } catch {
      // The reason was shown.
    }
  });
  showName();
})();

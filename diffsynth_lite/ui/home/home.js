// Home: which runs are shown, and the forms of its menus.
"use strict";
(() => {
  function showKind() {
    const kind = document.querySelector("[name=runs]:checked")?.value ?? "all";
    for (const card of document.querySelectorAll("[data-kind]")) {
      card.hidden = kind !== "all" && card.dataset.kind !== kind;
    }
  }

  document.addEventListener("change", (event) => {
    if (event.target.name === "runs") showKind();
  });
  document.addEventListener("renewed", showKind);

  document.addEventListener("submit", async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    const answer = await ui.post(event.target.dataset.form, given).catch(() => null);  // It was shown.
    if (answer) location.assign(answer.go ?? "/");
  });
})();

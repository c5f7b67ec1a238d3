// The plan next to the form: asked for at each change of the file, and shown part by part as it is counted.
"use strict";
(() => {
  const ASK_EVERY_MS = 250;
  const TRY_EVERY_MS = 1000; // where the server is gone
  const SECRET_AFTER_MS = 500;
  const byId = (id) => document.getElementById(id);
  let newest = 0; // question of this tab
  let asking = Promise.resolve();
  let number = 0; // that the server gave the plan that is shown

  // The old content stays, dimmed, until there is something of the new plan.
  function show(page) {
    for (const id of ["plan-message", "plan"]) {
      const now = page.getElementById(id);
      byId(id).ariaBusy = now.matches("[data-open]") && !now.children.length;
      if (byId(id).ariaBusy === "true" || byId(id).innerHTML === now.innerHTML) continue;
      byId(id).replaceChildren(...document.importNode(now, true).childNodes);
    }
  }

  function report(text) {
    byId("plan-message").replaceChildren(Object.assign(document.createElement("p"), { textContent: text }));
  }

  async function follow(own) {
    let tag = null;
    while (own === newest) {
      const answer = document.hidden ? null : await fetch(`plan?number=${number}`, { cache: "no-cache" }).catch(() => ({}));
      if (own !== newest) return;
      const isLost = answer && !answer.ok;
      if (isLost) {
        tag = null;
        report("No plan: the server does not answer.");
      } else if (answer && answer.headers.get("ETag") !== tag) {
        tag = answer.headers.get("ETag");
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (own !== newest) return;
        show(page);
        if (!page.querySelector("[data-open]")) return;
      }
      await new Promise((resolve) => setTimeout(resolve, isLost ? TRY_EVERY_MS : ASK_EVERY_MS));
    }
  }

  // One question after the other, as the newest is the one that is answered.
  function ask() {
    const own = ++newest;
    const use = byId("plan").querySelector("[data-use]");
    if (use) use.disabled = true; // It is of an older question.
    asking = asking.then(async () => {
      if (own !== newest) return;
      if (!sessionStorage.getItem("secret")) return report("No plan: this tab may only look.");
      const given = { gpu: byId("gpu").value, host_gib: byId("host").value };
      const found = await ui.post("plan", given).catch(() => ({})); // The reason was shown.
      if (!found.number) return;
      number = found.number;
      follow(own);
    });
  }

  for (const id of ["gpu", "host"]) {
    const kept = localStorage.getItem(`plan-${id}`);
    const isThere = id === "host" || [...byId("gpu").options].some((option) => option.value === kept);
    if (kept !== null && isThere) byId(id).value = kept;
    byId(id).addEventListener("change", ({ target }) => {
      localStorage.setItem(`plan-${id}`, target.value);
      ask();
    });
  }
  document.addEventListener("renewed", ask);
  byId("plan").addEventListener("click", async ({ target }) => {
    if (target.closest("[data-again]")) ask();
    if (!target.closest("[data-use]")) return;
    const before = configForm.text();
    byId("plan").focus();
    await configForm.change({ plan: number });
    if (configForm.text() === before) return;
    ui.report("The settings that fit were written.", { undo: () => configForm.change({ text: before }) });
  });
  // A tab that another one opened has its secret a little later.
  setTimeout(ask, sessionStorage.getItem("secret") ? 0 : SECRET_AFTER_MS);
})();

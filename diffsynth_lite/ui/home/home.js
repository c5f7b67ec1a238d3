// Home: the address says which runs are shown, so that the open page asks for just these.
"use strict";
(() => {
  const TYPED_MS = 200;
  const find = document.getElementById("find");
  let typing = null;

  function choose(key, value) {
    const query = new URLSearchParams(location.search);
    query.delete("page");
    if (value) query.set(key, value);
    else query.delete(key);
    history.replaceState(null, "", query.size ? `?${query}` : "/");
    document.dispatchEvent(new Event("changed"));
  }

  // A new count makes a new chip, which does not know whether it was chosen.
  function show() {
    const query = new URLSearchParams(location.search);
    const chosen = document.querySelector(`[name=runs][value="${CSS.escape(query.get("show") ?? "all")}"]`);
    if (chosen) chosen.checked = true;
    if (find !== document.activeElement) find.value = query.get("q") ?? "";
  }

  if (!find) return;
  find.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => choose("q", find.value.trim()), TYPED_MS);
  });
  document.addEventListener("change", ({ target }) => {
    if (target.name === "runs") choose("show", target.value === "all" ? "" : target.value);
  });
  document.addEventListener("renewed", show);
  show();
})();

// The log of a run while somebody looks at it: its own request, as it changes far more often than the page.
"use strict";
(() => {
  const ASK_EVERY_MS = 2000;

  async function show(log) {
    const answer = await fetch(log.dataset.log).catch(() => null);
    if (!answer?.ok) return;
    const text = await answer.text();
    if (log.textContent === text) return;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 20;
    log.textContent = text;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  function showOpen() {
    if (!document.hidden) document.querySelectorAll(".log[open] [data-log]").forEach(show);
  }

  setInterval(showOpen, ASK_EVERY_MS);
  document.addEventListener("toggle", showOpen, true);
  document.addEventListener("renewed", showOpen);
  showOpen();
})();

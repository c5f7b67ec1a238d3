// Keeps an open page up to date. One that is served asks for itself again, and takes over the differences, so that
// nothing flickers and the reader's choices stay. The file of a running run is loaded again.
"use strict";
(() => {
  const ASK_EVERY_MS = 2000;
  const RELOAD_EVERY_MS = 30000;
  const UNTOUCHED_MS = 5000;
  // Scripts have changed the content of these: each is taken over as a whole.
  const WHOLE = "section.previews, section.items";

  // The page as it was sent: this script runs before those that change it.
  const main = document.querySelector("main");
  let sent = main.cloneNode(true);
  let tag = null;
  let isAsking = false;

  function isAlike(one, other) {
    const shell = (element) => element.cloneNode(false);
    return (
      one.nodeType === Node.ELEMENT_NODE &&
      other.nodeType === Node.ELEMENT_NODE &&
      shell(one).isEqualNode(shell(other)) &&
      one.childNodes.length === other.childNodes.length &&
      !one.matches(WHOLE)
    );
  }

  // Turns `live`, which was sent as `before`, into `now`; equal parts stay as they are.
  function takeOver(live, before, now) {
    if (before.isEqualNode(now)) return live;
    if (!isAlike(before, now) || live.childNodes.length !== now.childNodes.length) {
      const made = document.importNode(now, true);
      live.replaceWith(made);
      return made;
    }
    const children = [...live.childNodes];
    children.forEach((child, place) => takeOver(child, before.childNodes[place], now.childNodes[place]));
    return live;
  }

  // The same for the parts of the page, of which some come only when a run has something to show there.
  function takeOverParts(now) {
    const name = (part) => `${part.tagName} ${part.className}`;
    const live = [...main.children];
    const known = [...sent.children].map((before, place) => ({ before, live: live[place] }));
    const parts = [...now.children].map((part) => {
      const place = known.findIndex(({ before }) => name(before) === name(part));
      if (place < 0) return document.importNode(part, true);
      const [old] = known.splice(place, 1);
      return takeOver(old.live, old.before, part);
    });
    known.forEach((gone) => gone.live.remove());
    parts.forEach((part, place) => {
      if (main.children[place] !== part) main.insertBefore(part, main.children[place] ?? null);
    });
  }

  function show(page) {
    const now = page.querySelector("main");
    takeOverParts(now);
    sent = now;
    document.title = page.title;
    document.getElementById("data").textContent = page.getElementById("data").textContent;
    document.dispatchEvent(new Event("renewed"));
  }

  const generator = (page) => page.querySelector("meta[name=generator]")?.content;

  async function ask() {
    const answer = await fetch(location.pathname + location.search, { cache: "no-cache" });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    if (answer.headers.get("ETag") === tag) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    // Another page than ours, or one of another version, needs its own scripts and styles.
    if (generator(page) !== generator(document)) return location.reload();
    show(page);
    tag = answer.headers.get("ETag");
  }

  async function askAndShow() {
    if (document.hidden || isAsking) return;
    isAsking = true;
    try {
      await ask();
      document.getElementById("lost").hidden = true;
    } catch {
      document.getElementById("lost").hidden = false;
    }
    isAsking = false;
  }

  function followServer() {
    setInterval(askAndShow, ASK_EVERY_MS);
    document.addEventListener("visibilitychange", askAndShow);
    document.addEventListener("changed", askAndShow);
  }

  // Browsers keep the place that was scrolled to; a reader who is doing something is not interrupted.
  function reloadNowAndThen() {
    let touchedAt = 0;
    for (const name of ["pointerdown", "pointermove", "keydown", "scroll"]) {
      addEventListener(name, () => (touchedAt = Date.now()), { passive: true });
    }
    setInterval(() => {
      if (!document.hidden && Date.now() - touchedAt > UNTOUCHED_MS) location.reload();
    }, RELOAD_EVERY_MS);
  }

  const renewal = document.documentElement.dataset.renewal;
  if (renewal === "ask") followServer();
  if (renewal === "reload") reloadNowAndThen();
})();

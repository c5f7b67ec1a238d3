// Two images or clips on top of each other, with a line to drag between them.
"use strict";
const comparison = (() => {
  function element(name, properties, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  function media({ src, alt, video }, className) {
    if (!video) return element("img", { src, alt, className });
    // Browsers start only muted videos by themselves.
    const plays = { loop: true, muted: true, playsInline: true, autoplay: true };
    const made = element("video", { src: video, ...plays, className });
    made.setAttribute("aria-label", alt);
    return made;
  }

  // The sign on the line that it can be dragged.
  function handle() {
    const icon = document.querySelector(".icon").cloneNode(true);
    icon.firstElementChild.setAttribute("href", "#i-drag");
    return element("span", { className: "handle" }, icon);
  }

  function slider(value, max, label) {
    const input = element("input", { type: "range", min: 0, max, value });
    input.setAttribute("aria-label", label);
    return input;
  }

  // Each of the two has `src`, `alt` and `label`, and `video` where it is a clip; `split` is where the line is, in %.
  function make(first, second, { name, split = 50, onSplit = () => {} }) {
    const compare = element("div", { className: "compare" });
    const line = slider(split, 100, name);
    const setSplit = () => compare.style.setProperty("--split", `${line.value}%`);
    line.addEventListener("input", setSplit);
    line.addEventListener("change", () => onSplit(line.value));
    setSplit();
    const [before, after] = [media(first, "before"), media(second, "after")];
    compare.append(
      before,
      after,
      element("span", { className: "veil label-before", textContent: first.label }),
      element("span", { className: "veil label-after", textContent: second.label }),
      handle(),
      line,
    );
    // Two videos drift apart where one of them was late to load.
    before.addEventListener("timeupdate", () => {
      if (Math.abs(before.currentTime - after.currentTime) > 0.1) after.currentTime = before.currentTime;
    });
    return { compare, after };
  }

  return { element, make, slider };
})();

// What the doctor finds as seen by a config: remarks, tokens and crops at the items, and what concerns all of them.
// An item whose file or caption is another one now is "changed since", and nothing more is shown of it.
"use strict";
(() => {
  const EVERY_MS = 2000;
  const SVG = "http://www.w3.org/2000/svg";
  const { base, byId, config, digits, element, escaped, kinds, plural } = dataSet;
  let known = { state: "none" }, asking = null, wasRunning = false;

  const hasLooked = () => Boolean(known.items);
  const isChanged = (item) => String(known.marks[item.file]) !== String([item.version, item.caption]);
  const seen = (item) => (hasLooked() && !isChanged(item) ? known.items[item.file] : undefined);

  function remarks(item, own) {
    if (!hasLooked()) return own;
    if (isChanged(item)) return [...own.slice(0, 2), ["quiet", "Changed since it was examined"]];
    const isBad = known.kinds.dropped?.files.includes(item.file);
    return (seen(item)?.remarks ?? []).map((text, place) => [isBad && place === 0 ? "stop" : "", text]);
  }

  // At one item.

  function cropsOf(item) {
    const all = seen(item)?.crops ?? [], size = byId("bucket").value;
    return size ? all.filter(({ bucket }) => bucket === size) : all.slice(0, 1);
  }

  function drawCrop(item, mat) {
    mat.querySelector(".crop")?.remove();
    const { width, height } = dataSet.facts(item), crops = byId("show-crop").checked && width ? cropsOf(item) : [];
    if (!crops.length) return;
    const drawing = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
    const boxes = crops.map(({ box: [left, top, right, bottom] }) => `M${left} ${top}V${bottom}H${right}V${top}z`);
    for (const [name, value] of [["class", "crop"], ["viewBox", `0 0 ${width} ${height}`], ["aria-hidden", "true"]]) {
      drawing.setAttribute(name, value);
    }
    path.setAttribute("d", `M0 0H${width}V${height}H0z${boxes.join("")}`);
    path.setAttribute("fill-rule", "evenodd");
    drawing.append(path);
    mat.append(drawing);
  }

  function show(item, cell) {
    const { tokens = [], limit = 0, crops = [] } = seen(item) ?? {}, most = Math.max(...tokens);
    const counted = tokens.length ? `${digits(most)} of ${plural(limit, "token")}` : "";
    const line = cell.querySelector(".tokens");
    line.textContent = counted;
    line.classList.toggle("over", most > limit);
    drawCrop(item, cell.querySelector(".mat"));
    if (item !== dataSet.current()) return;
    const sizes = [...new Set(crops.map(({ bucket }) => bucket))].join(", ");
    byId("trained-at").textContent = [sizes && `Trained at ${sizes}.`, counted && `${counted}.`].filter(Boolean).join(" ");
    drawCrop(item, byId("large-mat"));
    mark(item.caption);
  }

  // The caption with the phrase by which items are filtered.
  function mark(caption) {
    const kind = document.querySelector("[name=show]:checked").value;
    const phrase = kind.startsWith("phrase:") ? patternOf(known.phrases[kind.slice(7)].text) : null;
    byId("marked").hidden = !phrase;
    const parts = phrase ? caption.split(phrase) : [];
    byId("marked").replaceChildren(...parts.map((part, n) => (n % 2 ? element("mark", { textContent: part }) : part)));
  }

  function patternOf(phrase) {
    const words = phrase.split(/\s+/).map(escaped).join("[\\s_]+");
    const [from, to] = /[\u3040-\u9fff]/.test(phrase) ? ["", ""] : ["(?<![\\p{L}\\p{N}])", "(?![\\p{L}\\p{N}])"];
    return new RegExp(`${from}(${words})${to}`, "iu");
  }

  // About all of them.

  function ago(seconds) {
    if (seconds < 60) return "just now";
    const [number, unit] = seconds < 5400 ? [seconds / 60, "min"] : seconds < 172800 ? [seconds / 3600, "h"] : [seconds / 86400, "days"];
    return `${Math.round(number)} ${unit} ago`;
  }

  function head() {
    if (known.state === "running") return "Examining";
    if (!hasLooked()) return "It could not be examined";
    const changed = dataSet.items().filter(isChanged).length;
    const since = [changed && `${plural(changed, "item")} changed since`, known.is_config_changed && `${config} changed since`];
    return [`Examined ${ago((Date.now() - known.at) / 1000)}`, ...since.filter(Boolean)].join("; ");
  }

  function chip(kind, label, count) {
    const made = element("label", { className: "chip doctor" });
    made.append(element("input", { type: "radio", name: "show", value: kind }), `${label} `, count);
    return made;
  }

  const list = (id, texts) => {
    byId(id).hidden = !texts.length;
    byId(id).replaceChildren(...texts.map((text) => element("li", { textContent: text })));
  };

  function showChips() {
    const before = document.querySelector("[name=show]:checked").value;
    for (const old of document.querySelectorAll(".chip.doctor")) old.remove();
    for (const kind of Object.keys(kinds)) if (kind.includes(":")) delete kinds[kind];
    const add = (kind, label, has) => {
      kinds[kind] = has;
      const count = element("span", { className: "count" });
      count.dataset.count = kind;
      document.querySelector("#views .chips").append(chip(kind, label, count));
    };
    for (const [kind, { label, files }] of Object.entries(known.kinds ?? {})) {
      const named = new Set(files);
      add(`kind:${kind}`, label, (item) => named.has(item.file) && !isChanged(item));
    }
    if (hasLooked()) add("kind:changed since", "Changed since", isChanged);
    byId("phrases").replaceChildren(...(known.phrases ?? []).map(({ text, num_captions: number, num_all: all }, place) => {
      const pattern = patternOf(text);
      kinds[`phrase:${place}`] = (item) => pattern.test(item.caption);
      return chip(`phrase:${place}`, `"${text}"`, element("span", { className: "count", textContent: `${number} of ${all}` }));
    }));
    const same = [...document.querySelectorAll("[name=show]")].find(({ value }) => value === before);
    (same && !(hasLooked() && ["equal", "small"].includes(before)) ? same : document.querySelector("[name=show]")).checked = true;
  }

  function showRemedies() {
    byId("remedies").replaceChildren(...Object.entries(known.remedies ?? {}).flatMap(([kind, words]) => {
      const row = element("div", { className: "command" }), copy = byId("examine-copy").content.firstElementChild.cloneNode(true);
      copy.dataset.copy = words;
      copy.setAttribute("aria-label", `Copy the command for: ${known.kinds[kind].label}`);
      row.append(element("code", { textContent: words }), copy);
      return [element("p", { className: "label", textContent: known.kinds[kind].label }), row];
    }));
  }

  function showSizes() {
    const sizes = [...new Set(Object.values(known.items ?? {}).flatMap(({ crops }) => crops.map(({ bucket }) => bucket)))];
    const before = byId("bucket").value;
    byId("crops").hidden = !sizes.length;
    byId("bucket").replaceChildren(...["", ...sizes].map((size) => new Option(size || "each one's first size", size)));
    byId("bucket").value = sizes.includes(before) ? before : "";
    byId("bucket").hidden = sizes.length < 2 || !byId("show-crop").checked;
  }

  function take(given) {
    clearTimeout(asking);
    const isRunning = given.state === "running";
    if (isRunning) asking = setTimeout(ask, EVERY_MS);
    if (isRunning && wasRunning) return;
    known = { ...given, at: Date.now() - 1000 * (given.age_s ?? 0) };
    if (wasRunning && !isRunning) ui.report(head());
    wasRunning = isRunning;
    byId("examined").hidden = known.state === "none";
    byId("examine").disabled = isRunning || !config;
    byId("examining").hidden = byId("examine-stop").hidden = !isRunning;
    list("examined-problems", [...(known.problems ?? []), known.remedy].filter(Boolean));
    list("advice", known.advice ?? []);
    Object.assign(byId("examine-log"), { textContent: known.log?.join("\n") ?? "", hidden: !known.log?.length });
    byId("numbers").replaceChildren(...Object.entries(known.facts ?? {}).flatMap(([name, value]) => [
      element("dt", { textContent: name }), element("dd", { textContent: value }),
    ]));
    byId("numbers").parentElement.hidden = !known.facts;
    showChips();
    showRemedies();
    showSizes();
    if (document.querySelector("[name=show]:checked").value === "all") dataSet.refreshAll();
    else dataSet.filter();
  }

  async function ask() {
    const answer = config ? await fetch(`${base}examined${dataSet.asSeenBy}`).catch(() => null) : null;
    if (answer?.ok) take(await answer.json());
    else if (wasRunning) asking = setTimeout(ask, EVERY_MS);
  }

  const post = (action) => ui.post(`${base}examine`, { config, do: action }).then(ask, () => null);
  byId("examine")?.addEventListener("click", () => post("start"));
  byId("examine-stop").addEventListener("click", () => post("stop"));
  for (const id of ["show-crop", "bucket"]) byId(id)?.addEventListener("change", () => {
    byId("bucket").hidden = byId("bucket").options.length < 3 || !byId("show-crop").checked;
    dataSet.refreshAll();
  });
  document.addEventListener("counted", () => { if (byId("examined-head").textContent !== head()) byId("examined-head").textContent = head(); });
  if (!config || !byId("examine")) return;
  dataSet.useDoctor({ hasLooked, remarks, show });
  ask();
})();

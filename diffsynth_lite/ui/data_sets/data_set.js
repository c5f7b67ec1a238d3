// Images and clips with their captions. A change sends the caption that was there before: one that somebody else
// has changed meanwhile is never overwritten.
"use strict";
const dataSet = (() => {
  const PAUSE_MS = 600;
  const PAGE_SIZE = 1000;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const base = `/data/${encodeURIComponent(data.name)}/`;
  const asSeenBy = data.config ? `?config=${encodeURIComponent(data.config)}` : "";
  const chosen = new Set();
  let items = [], problems = [], found = null; // `found` is what the files themselves show
  let shown = [], first = 0, current = null;
  let cells = new Map();
  let doctor = { hasLooked: () => false, remarks: (item, own) => own, show() {} }; // See findings.js.

  const kinds = {
    all: () => true,
    missing: (item) => !item.caption && !item.problem,
    model: (item) => item.by,
    equal: (item) => !doctor.hasLooked() && found?.[item.file]?.equal,
    small: (item) => !doctor.hasLooked() && found?.[item.file]?.is_small,
  };
  const shownKind = () => document.querySelector("[name=show]:checked").value;
  const digits = (number) => number.toLocaleString("en");
  const plural = (number, word) => `${digits(number)} ${word}${number === 1 ? "" : "s"}`;
  const few = (names) => names.slice(0, 3).join("; ") + (names.length > 3 ? `; and ${names.length - 3} more` : "");
  const element = (tag, properties) => Object.assign(document.createElement(tag), properties);
  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const shortName = (model) => (model.includes("://") ? model : model.split("/").pop());
  const pathOf = (file) => file.split("/").map(encodeURIComponent).join("/");
  const thumbnail = (item, set = data.name, size = "cell") =>
    `/data/${encodeURIComponent(set)}/thumbnails/${pathOf(item.file)}?version=${item.version}&for=${size}`;

  // One cell.

  function make(item) {
    const cell = byId("item").content.firstElementChild.cloneNode(true);
    const part = (selector) => cell.querySelector(selector);
    for (const [one, name] of [[part("input"), "Choose"], [part("textarea"), "Caption of"], [part(".play"), "Play"]]) {
      one.setAttribute("aria-label", `${name} ${item.file}`);
    }
    cell.setAttribute("aria-label", item.file);
    cell.dataset.file = item.file;
    if (item.version) part("img").src = thumbnail(item);
    part(".play").hidden = !item.is_clip;
    part("textarea").readOnly = Boolean(item.locked);
    Object.assign(part(".foot .clip"), { textContent: item.file, title: item.file });
    part(".companions").hidden = !item.companions;
    part(".companions").append(...(item.companions ?? []).map((each) => {
      const line = element("li");
      if (each.set) line.append(element("img", { loading: "lazy", alt: "", src: thumbnail(each, each.set) }));
      line.append(element("span", { textContent: `${each.what}: ${each.where}` }));
      return line;
    }));
    cells.set(item.file, cell);
    refresh(item);
    return cell;
  }

  function refresh(item) {
    const cell = cells.get(item.file);
    if (!cell) return;
    const text = cell.querySelector("textarea");
    const value = item.typed ?? item.caption;
    // A space at the end stays, for what is typed next.
    if (text.value.trim() !== value.trim()) text.value = value;
    text.placeholder = item.problem && item.locked ? "" : "No caption"; // It has one that cannot be read.
    cell.querySelector(".remarks").replaceChildren(...remarksOn(item));
    const by = cell.querySelector(".by");
    const isOwn = kinds.model.any && item.caption && !item.locked;
    by.hidden = !(item.by || isOwn);
    by.textContent = item.by ? `by ${shortName(item.by)}` : "yours";
    by.title = item.by || "Written by you, or by a model and changed since";
    if (item === current) {
      byId("written-by").textContent = item.by ? `Its caption was written by ${item.by}.` : "";
      byId("remarks").replaceChildren(...remarksOn(item));
    }
    doctor.show(item, cell);
    cell.classList.toggle("chosen", chosen.has(item.file));
    cell.querySelector("input").checked = chosen.has(item.file);
  }

  // The doctor's remarks on an item, else what the files themselves show.
  function remarksOn(item) {
    const facts = found?.[item.file] ?? {};
    const own = [ // The last two are judged by the doctor where it has looked.
      ["stop", item.problem || facts.problem],
      ["", kinds.missing(item) && "No caption"],
      ["", facts.equal && `Equal to ${facts.equal}`],
      ["", facts.is_small && `${facts.width} x ${facts.height}, small`],
    ];
    const lines = [["stop", item.unsaved && "Not saved"], ...doctor.remarks(item, own), ["quiet", item.locked]];
    return lines.filter(([, text]) => text).map(([level, text]) => {
      const line = byId("remark").content.firstElementChild.cloneNode(true);
      line.className = `remark ${level}`;
      line.lastElementChild.textContent = text;
      return line;
    });
  }

  function refreshAll() {
    items.forEach(refresh);
    summarize();
  }

  // The page.

  function render() {
    cells = new Map();
    const now = shown.slice(first, first + PAGE_SIZE);
    byId("grid").replaceChildren(...now.map(make));
    byId("pages").hidden = shown.length <= PAGE_SIZE;
    byId("page").textContent = `${digits(first + 1)} to ${digits(first + now.length)} of ${digits(shown.length)}`;
    byId("page-before").disabled = first === 0;
    byId("page-after").disabled = first + PAGE_SIZE >= shown.length;
    byId("empty").hidden = items.length > 0;
    byId("shown").hidden = byId("views").hidden = items.length === 0;
    select(now.includes(current) ? current : now[0]);
    summarize();
  }

  function filter() {
    shown = items.filter(kinds[shownKind()]);
    first = 0;
    render();
  }

  function turn(pages) {
    first += pages * PAGE_SIZE;
    render();
    scrollTo(0, 0);
  }

  function summarize() {
    const counts = Object.fromEntries(Object.entries(kinds).map(([kind, has]) => [kind, items.filter(has).length]));
    const clips = items.filter((item) => item.is_clip).length, images = items.length - clips;
    const parts = [images && plural(images, "image"), clips && plural(clips, "clip")].filter(Boolean).join(" and ");
    const isEditable = items.some((item) => !item.locked);
    const captioned = digits(items.filter((item) => item.caption).length);
    const saved = isEditable ? " Captions are saved as you type." : "";
    byId("count").textContent = parts ? `${parts}, ${captioned} with a caption.${saved}` : "Nothing here yet.";
    byId("change").hidden = !isEditable;
    for (const count of document.querySelectorAll("[data-count]")) {
      const kind = count.dataset.count, isQuick = ["equal", "small"].includes(kind);
      const isNeeded = counts[kind] || ["all", "missing"].includes(kind) || (isQuick && !doctor.hasLooked());
      count.textContent = found || !isQuick ? digits(counts[kind]) : "...";
      count.parentElement.hidden = !isNeeded && shownKind() !== kind;
    }
    byId("selection").hidden = chosen.size === 0;
    byId("num-chosen").textContent = `${digits(chosen.size)} chosen`;
    byId("problems").hidden = problems.length === 0;
    byId("problems").querySelector("ul").replaceChildren(
      ...problems.map((text) => element("li", { textContent: text })),
    );
    document.dispatchEvent(new Event("counted"));
  }

  function select(item) {
    cells.get(current?.file)?.removeAttribute("aria-current");
    current = item ?? null;
    byId("panel").hidden = !item;
    if (!item) return;
    cells.get(item.file)?.setAttribute("aria-current", "true");
    refresh(item);
    const { width, height, bytes } = found?.[item.file] ?? {};
    const size = bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
    byId("large").hidden = !item.version;
    if (item.version) byId("large").src = thumbnail(item, data.name, "panel");
    byId("large").alt = item.file;
    byId("name").textContent = item.file;
    byId("facts").textContent = width ? `${digits(width)} x ${digits(height)}, ${size}` : "";
    byId("panel").setAttribute("aria-label", item.file);
  }

  // Goes to the caption of the next item, or the one before, on whichever page it is.
  function go(by) {
    const next = shown[shown.indexOf(current) + by];
    if (!next) return;
    if (!cells.has(next.file)) turn(by);
    const text = cells.get(next.file).querySelector("textarea");
    text.focus();
    text.closest(".item").scrollIntoView({ block: "nearest" });
  }

  function take(given) {
    const old = new Map(items.map((item) => [item.file, item]));
    const isSame = given.items.length === items.length
      && given.items.every(({ file, version }) => old.get(file)?.version === version);
    problems = given.problems;
    items = given.items.map((item) => {
      const kept = old.get(item.file);
      if (!kept) return item;
      for (const key of ["locked", "problem", "companions", "by"]) delete kept[key];
      // What was typed goes on from the caption that was there then; the server finds one that is newer.
      return Object.assign(kept, item, kept.typed === undefined ? {} : { caption: kept.caption });
    });
    for (const file of chosen) if (!items.some((item) => item.file === file)) chosen.delete(file);
    kinds.model.any = items.some(kinds.model);
    if (!isSame || !shown.length) {
      filter();
      examine();
    } else {
      refreshAll();
    }
    document.dispatchEvent(new CustomEvent("items", { detail: given.captioning }));
  }

  async function reload() {
    const answer = await fetch(`${base}items${asSeenBy}`).catch(() => null);
    if (answer?.ok) take(await answer.json());
  }

  async function examine() {
    const answer = items.length ? await fetch(`${base}findings${asSeenBy}`).catch(() => null) : null;
    if (!answer?.ok) return;
    found = await answer.json();
    select(current);
    refreshAll();
  }

  // Captions.

  async function send(changes) {
    const { stale, by } = await ui.post(`${base}captions`, {
      changes: changes.map(({ item, caption }) => ({ file: item.file, was: item.caption, caption })),
    });
    const late = changes.filter(({ item }) => item.file in stale);
    for (const { item, caption } of changes) {
      item.caption = stale[item.file] ?? caption.trim();
      item.by = by[item.file];
    }
    // What a person types goes before what a model wrote meanwhile.
    if (late.length && late.every(({ item }) => item.by && item.typed !== undefined)) return send(late);
    if (late.length) {
      const names = few(late.map(({ item }) => item.file));
      const text = `Changed by somebody else meanwhile, and not overwritten: ${names}. Undo puts yours in its place.`;
      ui.report(text, { undo: () => apply(late) });
    }
    return late;
  }

  async function apply(changes) {
    const late = await send(changes).catch(() => null);
    if (late) for (const { item } of changes) item.typed = undefined;
    refreshAll();
    return late && changes.length - late.length;
  }

  // Saves what was typed into one caption; what is typed meanwhile is saved after it.
  async function save(item) {
    clearTimeout(item.pause);
    const caption = item.typed;
    if (caption === undefined || item.isSaving) return;
    item.isSaving = true;
    const late = await send([{ item, caption }]).catch(() => null);
    item.isSaving = false;
    item.unsaved = late === null;
    if (late?.length) late[0].caption = item.typed; // what Undo puts there, with all that was typed meanwhile
    if (late?.length || (late && item.typed === caption)) item.typed = undefined;
    else if (late) item.pause = setTimeout(save, PAUSE_MS, item);
    refresh(item);
    summarize();
  }

  const itemAt = (target) => {
    const file = target.closest(".item")?.dataset.file;
    return file === undefined ? undefined : items.find((item) => item.file === file);
  };
  const grid = byId("grid");
  grid.addEventListener("input", ({ target }) => {
    const item = target.tagName === "TEXTAREA" && itemAt(target);
    if (!item) return;
    item.typed = target.value;
    clearTimeout(item.pause);
    item.pause = setTimeout(save, PAUSE_MS, item);
  });
  grid.addEventListener("change", ({ target }) => {
    const item = itemAt(target);
    if (!item) return;  // It has just left the data set, with what was typed.
    if (target.tagName === "TEXTAREA") save(item);
    if (target.type !== "checkbox") return;
    if (target.checked) chosen.add(item.file); else chosen.delete(item.file);
    refresh(item);
    summarize();
  });
  grid.addEventListener("focusin", ({ target }) => {
    select(itemAt(target));
    items.filter((item) => item.unsaved).forEach(save);
  });
  grid.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    save(itemAt(event.target));
    go(event.shiftKey ? -1 : 1);
  });
  grid.addEventListener("click", ({ target }) => {
    const item = itemAt(target), mat = target.closest(".mat");
    if (!mat) return;
    select(item);
    if (!target.closest(".play")) return;
    const src = `${base}clips/${pathOf(item.file)}`;
    const video = element("video", { src, controls: true, loop: true, autoplay: true, ariaLabel: item.file });
    video.addEventListener("error", () => ui.report(`${item.file}: this browser cannot play it.`));
    mat.replaceChildren(video);
    video.focus();
  });
  for (const [id, move, by] of [["before", go, -1], ["after", go, 1], ["page-before", turn, -1], ["page-after", turn, 1]]) {
    byId(id).addEventListener("click", () => move(by));
  }
  addEventListener("beforeunload", (event) => {
    if (items.some((item) => item.typed !== undefined)) event.preventDefault();
  });

  // Changes of all captions that are shown, on all pages.

  const labels = { replace: "Replace in shown", trigger: "Put trigger in front", prefix: "Put prefix in front" };
  const operation = () => document.querySelector("[name=change]:checked").value;

  // The new caption as pieces [tag, text], where tag is "del", "ins" or ""; null where nothing changes.
  function changed(caption) {
    const kind = operation(), text = byId(kind === "replace" ? "find" : kind).value, trigger = text.trim();
    if (kind === "replace") {
      const pair = [["del", text], ["ins", byId("with").value]];
      const parts = text ? caption.split(text) : [caption];
      return parts.length > 1 ? parts.flatMap((part, place) => [...(place ? pair : []), ["", part]]) : null;
    }
    const word = new RegExp(`(?<![\\p{L}\\p{N}_])${escaped(trigger)}(?![\\p{L}\\p{N}_])`, "iu");
    if (!trigger || (kind === "trigger" ? word.test(caption) : caption.startsWith(text))) return null;
    return [["ins", kind === "prefix" ? text : caption ? `${trigger}, ` : trigger], ["", caption]];
  }

  const wanted = () => shown.filter((item) => !item.locked).flatMap((item) => {
    const pieces = changed(item.caption);
    const caption = pieces?.filter(([tag]) => tag !== "del").map(([, text]) => text).join("");
    return pieces ? [{ item, pieces, caption }] : [];
  });

  function preview() {
    const changes = byId("change").open ? wanted() : [];
    for (const part of document.querySelectorAll("[data-change]")) part.hidden = part.dataset.change !== operation();
    byId("apply").textContent = labels[operation()];
    byId("apply").disabled = changes.length === 0;
    const lines = changes.slice(0, 3).map(({ pieces }) => {
      const line = element("p");
      line.append(...pieces.map(([tag, text]) => (tag ? element(tag, { textContent: text }) : text)));
      return line;
    });
    const head = `${digits(changes.length)} of ${plural(shown.length, "caption")} shown change`;
    byId("preview").replaceChildren(element("p", { className: "label", textContent: head }), ...lines);
  }

  byId("change").addEventListener("toggle", preview);
  byId("change").addEventListener("input", preview);
  byId("cancel").addEventListener("click", () => { byId("change").open = false; });
  byId("change").querySelector("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const number = await apply(wanted());
    byId("change").open = false;
    if (number) ui.report(`${plural(number, "caption")} changed.`, { undo });
  });

  // Undo, trash, files.

  async function act(what, given, options) {
    const { message } = await ui.post(base + what, given).catch(() => ({}));
    if (!message) return;
    await reload();
    ui.report(message, options);
  }
  const undo = () => act("undo");
  byId("undo").addEventListener("click", undo);
  byId("trash").addEventListener("click", () => {
    act("trash", { files: [...chosen], config: data.config }, { undo });
  });
  for (const [id, picked] of [["clear", () => []], ["choose-all", () => shown]]) {
    byId(id).addEventListener("click", () => {
      chosen.clear();
      for (const item of picked()) chosen.add(item.file);
      refreshAll();
    });
  }

  async function add(files) {
    const refused = [];
    let number = 0;
    for (const [place, { file, name }] of files.entries()) {
      byId("count").textContent = `Adding ${place + 1} of ${files.length}: ${name}`;
      const path = `${base}add?name=${encodeURIComponent(name)}`;
      const given = await ui.send(path, file).catch((error) => { refused.push(error.message); });
      number += given?.added.length ?? 0;
      if (given?.taken.length) refused.push(`${plural(given.taken.length, "file")} of ${name} whose names are taken`);
      if (given?.unread.length) refused.push(`${plural(given.unread.length, "file")} of ${name} of other kinds`);
    }
    await reload();
    summarize();
    ui.report(`${plural(number, "file")} added.${refused.length ? ` Not added: ${few(refused)}` : ""}`);
  }

  // The files of what was dropped, with their names below the folder that was dropped.
  async function inside(entry, path = "") {
    if (entry.isFile) {
      const file = await new Promise((done, fail) => entry.file(done, fail));
      return [{ file, name: path + entry.name }];
    }
    const reader = entry.createReader(), found = [];
    for (;;) {
      const some = await new Promise((done, fail) => reader.readEntries(done, fail));
      if (!some.length) return found;
      for (const each of some.filter(({ name }) => !name.startsWith("."))) {
        found.push(...await inside(each, each.isFile ? path : `${path}${each.name}/`));
      }
    }
  }

  for (const id of ["add", "choose"]) byId(id).addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", ({ target }) => {
    add([...target.files].map((file) => ({ file, name: file.name }))).finally(() => { target.value = ""; });
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, async (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      document.body.classList.toggle("dropping", kind === "dragover");
      if (kind !== "drop") return;
      const entries = [...event.dataTransfer.items].map((each) => each.webkitGetAsEntry()).filter(Boolean);
      add((await Promise.all(entries.map((entry) => inside(entry)))).flat());
    });
  }

  document.addEventListener("change", ({ target }) => {
    if (target.name !== "show") return;
    chosen.clear();
    filter();
  });
  byId("config")?.addEventListener("change", ({ target }) => {
    location.assign(`?config=${encodeURIComponent(target.value)}`);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) reload(); });
  take(data);
  return {
    asSeenBy, base, byId, digits, element, escaped, few, filter, kinds, plural, refreshAll, reload, thumbnail,
    config: data.config,
    facts: (item) => found?.[item.file] ?? {},
    useDoctor: (given) => { doctor = given; },
    items: () => items,
    current: () => current,
    chosen: () => items.filter(({ file }) => chosen.has(file)),
  };
})();

// Captions by a model: the form with its command, how far the latest one is, and writing some again.
"use strict";
(() => {
  const EVERY_MS = 1500;
  const PAUSE_MS = 250;
  const { byId, element, plural, digits, base } = dataSet;
  const form = byId("caption-form");
  const suggested = form.elements.model.value;
  let job = { state: "none" };
  let isOpen = false, wasActive = false, isClosed = false, asking = null, typing = null;

  const isActive = () => job.state === "starting" || job.state === "running";
  const post = (given) => ui.post(`${base}captioning`, given);
  const field = (name) => form.elements[name];
  const isDry = () => "dry-run" in (job.options ?? {});

  function duration(seconds) {
    const whole = Math.round(seconds);
    if (whole < 60) return `${whole} s`;
    return whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${(whole / 3600).toFixed(1)} h`;
  }

  function show(id, words) {
    const part = byId(id);
    part.hidden = !words;
    if ((part.lastElementChild ?? part).textContent !== words) (part.lastElementChild ?? part).textContent = words;
  }

  // How far the latest command is.

  function head() {
    const { state, phase, done, total, seconds_per_item: each, message } = job;
    const ended = isDry() && state === "finished" ? "preview" : state;
    const isTimed = phase === "captioning" && each;
    if (state === "running" && isTimed) return `${duration(each * (total - done))} left`;
    const words = state === "running" ? message || phase : ended;
    return words[0].toUpperCase() + words.slice(1);
  }

  const endings = {
    "did not start": "It ended before it began.",
    killed: "The process ended without a message. Nothing that was written is lost.",
    stopped: "Go on writes what is left.",
  };

  function showJob() {
    const { state, done = 0, total = 0, options = {}, failed = {}, preview = {}, log = [] } = job;
    const isUnfinished = ["stopped", "killed", "failed", "did not start"].includes(state);
    byId("job").hidden = !(isActive() || ((wasActive || isUnfinished) && !isClosed));
    if (byId("job").hidden) return;
    if (byId("job-head").textContent !== head()) byId("job-head").textContent = head();
    const pace = job.seconds_per_item ? `, ${job.seconds_per_item.toPrecision(2)} s an item` : "";
    byId("job-done").textContent = total ? `${digits(done)} of ${digits(total)} done${pace}` : "";
    Object.assign(byId("job-progress"), { max: total || 1, value: done, hidden: !isActive() });
    const goal = options.goal && `goal ${options.goal}`, trigger = options.trigger && `trigger ${options.trigger}`;
    const over = { model: "captions by a model", all: "all captions" }[options.replace] ?? "nothing of yours";
    const parts = [job.model || options.model, goal, trigger, isDry() ? "nothing is written" : `writes over ${over}`];
    byId("job-facts").textContent = parts.filter(Boolean).join(", ");
    setCommand("job-command", job.command);
    const text = log.join("\n") || endings[state] || job.message || "";
    show("job-log", isActive() || (isDry() && state === "finished") ? "" : text);
    showFailed(Object.entries(failed));
    showPreview(Object.entries(preview));
    byId("job-stop").hidden = !isActive();
    byId("job-close").hidden = isActive() || isOpen;
    byId("job-on").hidden = !isUnfinished || isDry();
  }

  function showFailed(failed) {
    const [note, list] = [byId("job-failed"), byId("job-failed").querySelector("ul")];
    note.hidden = !failed.length;
    note.querySelector("p").textContent = `${plural(failed.length, "item")} without a caption:`;
    list.replaceChildren(...failed.map(([file, reason]) => element("li", { textContent: `${file}: ${reason}` })));
  }

  function showPreview(preview) {
    byId("job-preview").hidden = !preview.length;
    byId("job-preview").replaceChildren(...preview.map(([file, caption]) => {
      const figure = element("figure", { className: "item" }), mat = element("div", { className: "mat" });
      const item = dataSet.items().find((each) => each.file === file);
      if (item?.version) mat.append(element("img", { src: dataSet.thumbnail(item), alt: file }));
      figure.append(mat, element("figcaption", { className: "small", textContent: caption }));
      return figure;
    }));
  }

  function setCommand(id, words = "") {
    byId(id).textContent = words;
    byId(id).nextElementSibling.dataset.copy = words;
  }

  function take(given) {
    const wasRunning = isActive();
    job = given;
    if (wasRunning && !isActive()) ui.report([head(), !isDry() && job.message].filter(Boolean).join(": "));
    wasActive ||= isActive();
    for (const [name, value] of form.dataset.filled ? [] : Object.entries(job.options ?? {})) {
      if (["model", "endpoint", "goal", "trigger", "language", "length", "format", "quantize"].includes(name)) {
        field(name).value = value;
      }
    }
    if (!form.dataset.filled && job.options?.endpoint) field("by").value = "server";
    form.dataset.filled = "yes";
    showPanel();
    clearTimeout(asking);
    if (isActive()) asking = setTimeout(dataSet.reload, EVERY_MS);
  }

  // The form.

  function showPanel() {
    showJob();
    form.hidden = !isOpen || isActive();
    byId("writing").hidden = form.hidden && byId("job").hidden;
    byId("write").setAttribute("aria-expanded", String(!byId("writing").hidden && !form.hidden));
    byId("write").hidden = !dataSet.items().some((item) => !item.locked);
    const known = job.state !== "none" && !isActive();
    for (const id of ["again", "chosen-again"]) byId(id).hidden = !known;
    if (!form.hidden) showCounts();
  }

  function targets(replace) {
    const usable = dataSet.items().filter((item) => !item.locked && !item.problem);
    return usable.filter((item) => !item.caption || replace === "all" || (replace === "model" && item.by));
  }

  function showCounts() {
    for (const chip of form.querySelectorAll("[name=replace]")) {
      chip.parentElement.querySelector(".count").textContent = digits(targets(chip.value).length);
    }
    const replace = field("replace").value, chosen = targets(replace);
    const own = chosen.filter((item) => item.caption && !item.by).length;
    show("c-own", own ? `${plural(own, "caption")} of yours will be written over; Undo brings them back.` : "");
    byId("c-write").textContent = `Write ${plural(chosen.length, "caption")}`;
    byId("c-write").disabled = byId("c-preview").disabled = !chosen.length;
  }

  function given(action) {
    const values = Object.fromEntries(new FormData(form));
    if (values.by === "model") delete values.endpoint;
    return { ...values, do: action };
  }

  async function showForm() {
    for (const part of form.querySelectorAll("[data-by]")) part.hidden = part.dataset.by !== field("by").value;
    for (const part of form.querySelectorAll("[data-goal]")) part.hidden = part.dataset.goal !== field("goal").value;
    showCounts();
    const { command, host, wrong } = await post(given("command")).catch(() => ({}));
    setCommand("c-command", command);
    byId("c-command").parentElement.hidden = !command;
    byId("c-host").textContent = host ? `Images are sent to ${host}.` : "";
    show("c-wrong", wrong ?? "");
  }

  async function start(request) {
    const started = await post(request).catch((error) => show("c-wrong", error.message));
    if (!started) return;
    wasActive = true;
    isClosed = false;
    isOpen &&= request.do === "preview";
    show("c-wrong", "");
    await dataSet.reload();
    byId("writing").scrollIntoView({ block: "start" });
  }

  form.addEventListener("input", ({ target }) => {
    const [from, to] = target.value === "server" ? [suggested, ""] : ["", suggested];
    if (target.name === "by" && field("model").value === from) field("model").value = to;
    clearTimeout(typing);
    typing = setTimeout(showForm, PAUSE_MS);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    start(given("write"));
  });
  byId("c-preview").addEventListener("click", () => start(given("preview")));
  byId("write").addEventListener("click", () => {
    isOpen = !isOpen;
    showPanel();
    if (!isOpen || isActive()) return;
    showForm();
    field("model").focus();
  });
  for (const id of ["c-close", "job-close"]) byId(id).addEventListener("click", () => {
    isOpen = false;
    isClosed = true;
    showPanel();
    byId("write").focus();
  });
  byId("job-stop").addEventListener("click", () => post({ do: "stop" }).then(dataSet.reload, () => null));
  byId("job-on").addEventListener("click", () => start({ do: "go on" }));

  // Some again.

  async function again(items) {
    const own = items.filter((item) => item.caption && !item.by);
    if (own.length) {
      byId("ask-text").textContent = `${dataSet.few(own.map(({ file }) => file))}: Undo brings it back.`;
      byId("ask").returnValue = "";
      byId("ask").showModal();
      await new Promise((done) => byId("ask").addEventListener("close", done, { once: true }));
      if (byId("ask").returnValue !== "yes") return;
    }
    start({ do: "again", files: items.map(({ file }) => file) });
  }
  byId("again").addEventListener("click", () => again([dataSet.current()]));
  byId("chosen-again").addEventListener("click", () => again(dataSet.chosen()));

  document.addEventListener("items", ({ detail }) => take(detail));
  document.addEventListener("counted", showPanel);
  take(JSON.parse(byId("data").textContent).captioning);
})();

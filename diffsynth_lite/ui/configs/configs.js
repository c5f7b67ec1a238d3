// The form and the text of a config: what is typed is sent at each pause, and all is shown as the file then has it.
"use strict";
(() => {
  const PAUSE_MS = 300;
  const byId = (id) => document.getElementById(id);
  const text = byId("text");
  const waiting = new Map(); // what is typed and not yet sent, by its element
  let state = JSON.parse(byId("data").textContent);
  let sending = Promise.resolve();

  // Fills the page; an element that is typed in keeps what is typed.
  function show(given, { over = false } = {}) {
    const hadForm = Object.keys(state.values).length > 0;
    state = given;
    const hasForm = Object.keys(state.values).length > 0;
    if (hasForm && !hadForm && !document.querySelector("[data-key]")) return location.reload();
    byId("no-form").hidden = hasForm;
    for (const part of document.querySelectorAll(".group, #more")) part.hidden = !hasForm;
    put(text, state.text, over);
    for (const [key, value] of Object.entries(state.values)) {
      const input = byId(key);
      const field = input.closest(".field");
      if (input.matches("select")) fill(input, value.value);
      else put(input, value.value, over);
      field.classList.toggle("changed", value.is_own);
      const reset = field.querySelector(".reset");
      reset.hidden = !value.is_own;
      reset.title = `As in the recipe: ${value.inherited || "nothing"}`;
      const line = value.line ? ` (line ${value.line})` : "";
      tell(field.querySelector(".error"), value.wrong && value.wrong + line);
      tell(field.querySelector(".remark"), value.remark);
      byId(`${key}-help`).hidden = Boolean(value.wrong);
      if (value.wrong) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
    byId("own").textContent = state.own;
    byId("extends").hidden = !state.extends;
    byId("extends").querySelector("b").textContent = state.extends;
    byId("needs").hidden = !state.needs;
    byId("needs-words").textContent = state.needs;
    showProblems();
  }

  const put = (input, value, over) => {
    const isTyped = waiting.has(input) || input === document.activeElement;
    if ((over || !isTyped) && input.value !== value) input.value = value;
  };
  const tell = (line, words) => {
    if (line.lastElementChild.textContent !== words) line.lastElementChild.textContent = words;
    line.hidden = !words;
  };
  const fill = (select, value) => {
    if (![...select.options].some((option) => option.value === value)) select.add(new Option(value, value));
    select.value = value;
  };

  // All that is wrong, each with a button that leads to its line of the text.
  function showProblems() {
    const items = state.problems.map((one) => {
      const item = document.createElement("li");
      item.append(`${one.key ? `${one.key}: ` : ""}${one.text} `);
      if (one.file) {
        item.append(`Line ${one.line} of ${one.file}`);
        return item;
      }
      const line = Object.assign(document.createElement("button"), { type: "button", className: "plain small" });
      line.textContent = `Line ${one.line}`;
      line.addEventListener("click", () => goTo(one.line));
      item.append(line);
      return item;
    });
    const list = Object.assign(document.createElement("ul"), { className: "note stop" });
    list.append(...items);
    byId("problems").replaceChildren(...(items.length ? [list] : []));
  }

  function goTo(line) {
    choose(byId("tab-text"));
    const lines = text.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    text.focus();
    text.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
  }

  // Sends one change after the other: each knows the text that the one before it made.
  function change(given) {
    sending = sending.then(async () => {
      try {
        show(await ui.post("change", { hash: state.hash, ...given }));
      } catch (error) {
        if (error.answer?.state) show(error.answer.state, { over: true });
      }
    });
    return sending;
  }

  function send(input) {
    if (!waiting.has(input)) return;
    clearTimeout(waiting.get(input));
    waiting.delete(input);
    change(input === text ? { text: text.value } : { key: input.id, value: input.value });
  }

  byId("form").addEventListener("input", ({ target }) => {
    clearTimeout(waiting.get(target));
    waiting.set(target, setTimeout(() => send(target), target.matches("select") ? 0 : PAUSE_MS));
  });
  byId("form").addEventListener("change", ({ target }) => send(target));
  byId("form").addEventListener("focusout", ({ target }) => {
    if (!waiting.has(target)) sending.then(() => show(state));
  });
  byId("form").addEventListener("click", ({ target }) => {
    const field = target.closest(".reset")?.closest(".field");
    if (field) change({ key: field.dataset.key, value: null });
  });

  async function flush() {
    for (const input of [...waiting.keys()]) send(input);
    await sending;
  }

  byId("start").addEventListener("click", async ({ currentTarget }) => {
    currentTarget.disabled = true;
    try {
      await flush();
      location.assign((await ui.post("start")).go);
    } catch {
      // The reason was shown.
    } finally {
      byId("start").disabled = false;
    }
  });

  // Another tab or an editor may have changed the file while this tab was hidden.
  document.addEventListener("visibilitychange", async () => {
    if (document.hidden) return flush();
    const answer = await fetch("state").catch(() => null);
    if (answer?.ok && !waiting.size) show(await answer.json());
  });

  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function choose(chosen) {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", tab === chosen);
      tab.tabIndex = tab === chosen ? 0 : -1;
    }
    const isText = chosen.id === "tab-text";
    byId("text-panel").hidden = !isText;
    byId("settings-panel").hidden = isText;
    byId("form").classList.toggle("differs", chosen.id === "tab-differs");
    if (chosen.id === "tab-differs" && byId("more")) byId("more").open = true;
  }
  for (const [place, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (!step) return;
      const next = tabs.at((place + step) % tabs.length);
      choose(next);
      next.focus();
    });
  }
  showProblems();
  if (!Object.keys(state.values).length) choose(byId("tab-text"));
})();

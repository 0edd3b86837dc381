"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const jobs = find("jobs"), details = find("details"), problem = find("problem");
  const filter = { job: find("job"), state: find("state") };
  const label = (element) => element.getAttribute("aria-label") || "";
  const periodOf = (element) => label(element).split("\n", 1)[0];
  const cellsOf = (row) => [...row.querySelectorAll("td.c")];
  const visibleRows = () => [...jobs.rows].filter((row) => !row.hidden);

  // --- Details, on hover and on focus. ---
  const TOLD = "td.c, .held";
  let told = null;
  function tell(element) {
    told = element;
    details.hidden = !element;
    if (!element) return;
    const name = element.closest("tr").dataset.job;
    details.textContent = `${name}\n${label(element)}`;
    const box = element.getBoundingClientRect(), own = details.getBoundingClientRect();
    const below = box.bottom + 6 + own.height < innerHeight;
    details.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - 6 - own.height)}px`;
    details.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 8))}px`;
  }
  jobs.addEventListener("mouseover", (event) => tell(event.target.closest(TOLD)));
  jobs.addEventListener("mouseleave", () => tell(null));
  jobs.addEventListener("focusin", (event) => tell(event.target.closest(TOLD)));
  jobs.addEventListener("focusout", () => tell(null));
  addEventListener("scroll", () => { if (told) tell(told); }, true);
  addEventListener("keydown", (event) => { if (event.key === "Escape") tell(null); });

  // --- One tab stop for the whole grid; arrows move inside it. ---
  let stop = null;
  function setStop(cell) {
    if (stop) stop.tabIndex = -1;
    stop = cell;
    if (stop) stop.tabIndex = 0;
  }
  function ensureStop() {
    if (stop && stop.isConnected && !stop.closest("tr").hidden) return;
    setStop(visibleRows().map((row) => cellsOf(row).at(-1)).find(Boolean) || null);
  }
  jobs.addEventListener("focusin", (event) => {
    const cell = event.target.closest("td.c");
    if (cell) setStop(cell);
  });
  jobs.addEventListener("keydown", (event) => {
    const cell = event.target.closest("td.c");
    if (!cell || event.altKey || event.metaKey) return;
    const row = cell.closest("tr"), cells = cellsOf(row), at = cells.indexOf(cell);
    const rows = visibleRows().filter((each) => cellsOf(each).length), line = rows.indexOf(row);
    const inRow = (number, from) => {
      const other = rows[Math.max(0, Math.min(rows.length - 1, number))];
      const all = cellsOf(other);
      return all[Math.max(0, all.length - from)];
    };
    const fromRight = cells.length - at;
    const next = {
      ArrowLeft: () => cells[Math.max(0, at - 1)],
      ArrowRight: () => cells[Math.min(cells.length - 1, at + 1)],
      ArrowUp: () => inRow(line - 1, fromRight),
      ArrowDown: () => inRow(line + 1, fromRight),
      PageUp: () => inRow(line - 10, fromRight),
      PageDown: () => inRow(line + 10, fromRight),
      Home: () => (event.ctrlKey ? inRow(0, Infinity) : cells[0]),
      End: () => (event.ctrlKey ? inRow(rows.length - 1, 1) : cells.at(-1)),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    next().focus();
  });

  // --- Filter; kept in the address, so that it can be sent to somebody. ---
  function apply(row) {
    const text = filter.job.value.trim().toLowerCase(), state = filter.state.value;
    const named = row.cells[0].textContent.toLowerCase().includes(text);
    row.hidden = !named || (state !== "" && !row.dataset.states.split(" ").includes(state));
    if (row.hidden) return;
    for (const cell of cellsOf(row)) {
      const dim = state !== "" && !cell.classList.contains(state);
      if (cell.classList.contains("dim") !== dim) cell.classList.toggle("dim", dim);
    }
  }
  function count() {
    const all = jobs.rows.length, shown = visibleRows().length;
    const text = shown === all ? `${all} jobs` : `${shown} of ${all} jobs`;
    if (find("shown").textContent !== text) find("shown").textContent = text;
  }
  function filtered() {
    for (const row of jobs.rows) apply(row);
    ensureStop();
    count();
    const kept = new URLSearchParams();
    for (const [name, input] of Object.entries(filter)) if (input.value) kept.set(name, input.value);
    history.replaceState(null, "", kept.size ? `#${kept}` : location.pathname + location.search);
  }
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const [name, input] of Object.entries(filter)) {
    input.value = kept.get(name) || "";
    input.addEventListener("input", filtered);
  }
  if (kept.has("job") || kept.has("state")) filtered();
  ensureStop();
  count();
  const grid = find("grid"); // where it is too wide the newest periods are what is looked for
  grid.scrollLeft = grid.scrollWidth;

  // --- New figures without a reload: what has not changed is left alone. ---
  const seconds = Number(document.documentElement.dataset.refresh);
  if (!seconds) return;
  const pause = find("pause");
  const texts = new Map(); // of the rows, as they were sent
  // Without what is set here: the tab stop, and what the filter dims.
  const plain = (row) => row.innerHTML.replace(/ tabindex="(0|-1)"/g, "").replace(/ dim"/g, '"');
  const START = '<tbody id="jobs">', END = "</tbody>";
  pause.hidden = false;

  function takeRows(text) {
    const focused = document.activeElement, at = focused && focused.closest("#jobs td.c, #jobs .held");
    const kept = at && { job: at.closest("tr").dataset.job, held: at.matches(".held"), period: periodOf(at) };
    const hovered = told && { job: told.closest("tr").dataset.job, held: told.matches(".held"), period: periodOf(told) };
    const before = new Map([...jobs.rows].map((row) => [row.dataset.job, row]));
    const template = document.createElement("template");
    let place = jobs.rows[0] || null;
    for (const part of text.split("</tr>")) {
      const begin = part.indexOf("<tr");
      if (begin < 0) continue;
      const sent = part.slice(begin), raw = /data-job="([^"]*)"/.exec(sent)[1];
      let row = null, name;
      if (texts.get(raw)?.sent === sent) {
        name = texts.get(raw).name;
        row = before.get(name);
      }
      if (!row) {
        template.innerHTML = `${sent}</tr>`;
        row = template.content.firstElementChild;
        name = row.dataset.job;
        const old = before.get(name);
        if (old && plain(old) === plain(row)) {
          row = old;
        } else {
          apply(row);
          if (old && old === place) place = row;
          if (old) old.replaceWith(row);
        }
        texts.set(raw, { sent, name });
      }
      before.delete(name);
      if (row === place) place = row.nextElementSibling;
      else jobs.insertBefore(row, place);
    }
    for (const row of before.values()) row.remove();
    const again = (wanted) => {
      const row = [...jobs.rows].find((each) => each.dataset.job === wanted.job);
      if (!row || row.hidden) return null;
      if (wanted.held) return row.querySelector(".held");
      return cellsOf(row).find((cell) => periodOf(cell) === wanted.period) || cellsOf(row)[0];
    };
    if (kept && !at.isConnected) again(kept)?.focus({ preventScroll: true });
    if (hovered && (!told || !told.isConnected || details.hidden)) tell(again(hovered));
    ensureStop();
    count();
  }
  function take(text) {
    const start = text.indexOf(START), end = text.indexOf(END, start);
    if (start < 0 || end < 0) throw new Error("not the page");
    const rest = text.slice(0, start + START.length) + text.slice(end);
    const sent = new DOMParser().parseFromString(rest, "text/html");
    for (const part of document.querySelectorAll("[data-part]")) {
      const fresh = sent.querySelector(`[data-part="${part.dataset.part}"]`);
      if (fresh && !fresh.isEqualNode(part)) part.replaceWith(fresh);
    }
    const section = jobs.closest("section"), fresh = sent.getElementById("jobs").closest("section");
    section.hidden = fresh.hidden;
    takeRows(text.slice(start + START.length, end));
  }
  function complain(sentence) {
    problem.hidden = !sentence;
    if (problem.textContent !== sentence) problem.textContent = sentence;
  }
  let timer = 0, busy = false, answered = new Date();
  const running = () => !document.hidden && pause.getAttribute("aria-pressed") === "false";
  async function refresh() {
    clearTimeout(timer);
    if (busy || !running()) return;
    busy = true;
    try {
      const limit = AbortSignal.timeout(seconds * 2000);
      const answer = await fetch(location.pathname + location.search, { cache: "no-store", signal: limit });
      const text = await answer.text();
      if (answer.ok) {
        take(text);
        complain("");
        answered = new Date();
      } else {
        const sent = new DOMParser().parseFromString(text, "text/html").getElementById("problem");
        const why = sent ? sent.textContent : `The server answers with ${answer.status}.`;
        complain(`${why} What is shown is from ${answered.toLocaleTimeString()}; trying again.`);
      }
    } catch (error) {
      const why = error.message === "not the page"
        ? "The server answers with something else than this page (reload it to log in again)."
        : "The server does not answer.";
      complain(`${why} What is shown is from ${answered.toLocaleTimeString()}; trying again.`);
    }
    busy = false;
    schedule();
  }
  function schedule() {
    clearTimeout(timer);
    if (running()) timer = setTimeout(refresh, seconds * 1000);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") === "true";
    pause.setAttribute("aria-pressed", String(!paused));
    if (paused) refresh(); else clearTimeout(timer);
  });
  schedule();
})();

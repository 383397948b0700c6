// Shows the log of one worker, or of Spark, and what is added to it.

import { find, html, listen, look } from "/pieces.js";

const LINES_MAX = 2_000, LIST_MS = 5_000, RETRY_MS = 2_000;
const LEVELS = { WARNING: "warning", WARN: "warning", ERROR: "error", CRITICAL: "error", FATAL: "error" };

let began = false, isOver = false, following = null;

// Begins as soon as the page may read logs; now: what /api/events said last.
export function showLogs(now) {
  isOver = now.ended !== null;
  if (now.may_read_logs && !began) {
    began = true;
    list();
  } else if (!now.may_read_logs) {
    find("log-place").textContent = "for the user who runs the pipeline: open this page as that user, or with #token=…";
  }
}

// Offers the logs that there are, again and again: workers begin theirs when they start.
async function list() {
  const choice = find("log-choice");
  for (; ; await pause(LIST_MS)) {
    const found = await look("/api/logs").catch(() => null);
    if (found) {
      const there = new Set([...choice.options].map((option) => option.value));
      choice.append(...found.logs.filter((name) => !there.has(name)).map((name) => html("option", { value: name }, name)));
      choice.hidden = choice.options.length === 0;
      find("log-place").textContent = placeText(found);
      if (!choice.hidden && following === null) follow(choice.value);
    }
    if (isOver) return;
  }
}

function placeText(found) {
  if (!found.place) return "the run has not said yet where its logs are";
  return found.logs.length ? `in ${found.place}` : `none on this machine; workers write them to ${found.place} on theirs`;
}

async function follow(name) {
  following?.abort();
  const mine = following = new AbortController(), pre = find("log");
  pre.hidden = false;
  while (!mine.signal.aborted) {
    pre.replaceChildren();
    await listen(`/api/logs/${name}/events`, (events) => add(pre, events.map((one) => one.text).join("")), mine.signal)
      .catch(() => null);
    if (isOver) return;
    await pause(RETRY_MS);
  }
}

function add(pre, text) {
  const isAtEnd = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 20;
  const lines = text.split("\n").slice(0, -1).slice(-LINES_MAX);
  pre.append(...lines.map((line) => html("div", { class: LEVELS[line.split(" ", 2)[1]] ?? "" }, line)));
  while (pre.childElementCount > LINES_MAX) pre.firstElementChild.remove();
  if (isAtEnd) pre.scrollTop = pre.scrollHeight;
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

find("log-choice").addEventListener("change", () => follow(find("log-choice").value));

// What the pages have in common: numbers as people read them, pieces of HTML, and the two ways to the server.
// The token, if there is one, stands behind # in the address, so that no server logs it.

const token = new URLSearchParams(location.hash.slice(1)).get("token");
const headers = token ? { Authorization: `Bearer ${token}` } : {};
const RETRY_MS = 2_000;
export const find = (id) => document.getElementById(id);

// ---- numbers and times as people read them

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1_000) return `${Math.round(value * 10) / 10}`;
  const [unit, size] = value < 1e6 ? ["k", 1e3] : value < 1e9 ? ["M", 1e6] : ["G", 1e9];
  return `${(value / size).toPrecision(3)} ${unit}`;
}

export const whole = (value) => value.toLocaleString("en");

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1_024 && at < units.length - 1) { bytes /= 1_024; at++; }
  return `${at ? bytes.toFixed(1) : bytes} ${units[at]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1_000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1_000).toFixed(1)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min ${Math.floor(ms / 1_000) % 60} s`;
  return `${Math.floor(ms / 3_600_000)} h ${Math.floor(ms / 60_000) % 60} min`;
}

export function micros(us) {
  if (us < 1_000) return `${us} µs`;
  return us < 1_000_000 ? `${(us / 1_000).toPrecision(3)} ms` : duration(us / 1_000);
}

export const clock = (ms) => new Date(ms).toISOString().slice(11, 19);
export const moment = (ms) => (ms === null || ms === undefined ? "–" : new Date(ms).toISOString().replace("T", " ").slice(0, 19));
export const share = (value) => (value === undefined ? "–" : `${Math.round(value * 100)} %`);

// ---- pieces of the page

export function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function table(id, titles, rows) {
  const kind = (title) => (title.startsWith("#") ? { class: "number" } : {});
  const head = html("tr", {}, ...titles.map((title) => html("th", kind(title), title.replace("#", ""))));
  const body = rows.map((row) =>
    html("tr", {}, ...row.map((cell, at) => html("td", kind(titles[at]), cell instanceof Element ? cell : `${cell ?? ""}`))));
  find(id).replaceChildren(...(titles.some((title) => title) ? [head] : []), ...body);
}

export function badge(id, state) {
  find(id).textContent = state;
  find(id).className = `badge ${state}`;
}

export function message(text, isBad) {
  find("message").hidden = false;
  find("message").textContent = text;
  find("message").className = isBad ? "bad" : "";
}

// ---- what people ask for

const QUESTIONS = {
  stop: "Stop the pipeline after a last checkpoint? The same command continues from there.",
  drain: "End the sources and process everything in flight? A drained pipeline has finished.",
};

// Asks for the wish of a button; body says of what.
export async function ask(button, body = {}) {
  const wish = button.dataset.wish;
  if (wish === "savepoint") {
    body.path = prompt("Where? An empty directory or a URL that the driver can reach:");
    if (!body.path) return;
  } else if (QUESTIONS[wish] && !confirm(QUESTIONS[wish])) return;
  button.disabled = true;
  try {
    const answer = await fetch(`/api/ask/${wish}`, { method: "POST", headers, body: JSON.stringify(body) });
    const found = await answer.json();
    message(found.answer ?? found.error, !answer.ok);
  } catch {
    message("the server of this page does not answer", true);
  } finally {
    button.disabled = false;
  }
}

// ---- server-sent events, read with fetch: EventSource cannot send the token in a header

// Calls show with each piece of news until it returns true: then nothing comes any more. Calls lost between tries.
export async function follow(show, lost) {
  for (;;) {
    try {
      if (await followOnce(show)) return;
    } catch {
      // the server is gone, or not there yet
    }
    lost();
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

// Returns what the server says at path, null if it refuses.
export async function look(path) {
  const answer = await fetch(path, { headers });
  return answer.ok ? answer.json() : null;
}

async function followOnce(show) {
  let isOver = false;
  await listen("/api/events", (events) => { isOver = show(events.at(-1)); }); // each says everything
  return isOver;
}

// Calls heard with the events that come from path, several at once where they came at once, until the server ends.
export async function listen(path, heard, signal) {
  const answer = await fetch(path, { headers, signal });
  if (!answer.ok) {
    message((await answer.json()).error, true);
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    const found = events.filter((event) => event.startsWith("data: "));
    if (found.length) heard(found.map((event) => JSON.parse(event.slice("data: ".length))));
  }
}

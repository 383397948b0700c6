// Shows what /api/events tells. The token, if there is one, stands behind # in the address, so that no server logs it.

import { draw, svg } from "/graph.js";

const token = new URLSearchParams(location.hash.slice(1)).get("token");
const headers = token ? { Authorization: `Bearer ${token}` } : {};
const RETRY_MS = 2_000;
const find = (id) => document.getElementById(id);

// ---- numbers and times as people read them

function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1_000) return `${Math.round(value * 10) / 10}`;
  const [unit, size] = value < 1e6 ? ["k", 1e3] : value < 1e9 ? ["M", 1e6] : ["G", 1e9];
  return `${(value / size).toPrecision(3)} ${unit}`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1_024 && at < units.length - 1) { bytes /= 1_024; at++; }
  return `${at ? bytes.toFixed(1) : bytes} ${units[at]}`;
}

function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1_000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1_000).toFixed(1)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min ${Math.floor(ms / 1_000) % 60} s`;
  return `${Math.floor(ms / 3_600_000)} h ${Math.floor(ms / 60_000) % 60} min`;
}

const clock = (ms) => new Date(ms).toLocaleTimeString();
const moment = (ms) => (ms === null || ms === undefined ? "–" : new Date(ms).toISOString().replace("T", " ").slice(0, 19));
const share = (value) => (value === undefined ? "–" : `${Math.round(value * 100)} %`);

// ---- pieces of the page

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function table(id, titles, rows) {
  const kind = (title) => (title.startsWith("#") ? { class: "number" } : {});
  const head = html("tr", {}, ...titles.map((title) => html("th", kind(title), title.replace("#", ""))));
  const body = rows.map((row) =>
    html("tr", {}, ...row.map((cell, at) => html("td", kind(titles[at]), cell === null ? "" : `${cell}`))));
  find(id).replaceChildren(...(titles.some((title) => title) ? [head] : []), ...body);
}

function tile(title, value, more = "") {
  return html("div", { class: "tile" }, html("span", {}, title), html("b", {}, value), html("span", {}, more));
}

function curves(rates) {
  const target = find("rates"), width = target.clientWidth || 800, height = 140, left = 56, low = height - 20;
  const most = Math.max(1, ...rates.map(([, read, written]) => Math.max(read, written)));
  const first = rates.length ? rates[0][0] : 0, last = rates.length ? rates.at(-1)[0] : 1;
  const x = (at) => left + ((at - first) / Math.max(1, last - first)) * (width - left - 8);
  const y = (value) => low - (value / most) * (low - 10);
  const line = (at, kind) => svg("path", {
    class: `curve ${kind}`, d: rates.map((point, i) => `${i ? "L" : "M"}${x(point[0])} ${y(point[at])}`).join(" "),
  });
  const text = (words, at, level, anchor = "end") => {
    const found = svg("text", { x: at, y: level, class: "faint", "text-anchor": anchor });
    found.textContent = words;
    return found;
  };
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.replaceChildren(
    svg("line", { x1: left, x2: width, y1: low, y2: low, class: "axis" }),
    svg("line", { x1: left, x2: width, y1: 10, y2: 10, class: "axis" }),
    text(count(most), left - 6, 14), text("0", left - 6, low + 4),
    ...(rates.length > 1 ? [text(clock(first), left, height - 4, "start"), text(clock(last), width - 2, height - 4)] : []),
    line(1, "read"), line(2, "written"),
  );
}

function rateText(node, now) {
  if (node.role === "source") return `${count(now.records_out_per_second)} records/s`;
  if (node.role === "sink") return `${count(now.records_in_per_second)} records/s`;
  return `${count(now.records_in_per_second)} in, ${count(now.records_out_per_second)} out per s`;
}

// ---- the whole

function show(now) {
  const progress = now.progress, nodes = progress?.nodes ?? [];
  const byName = Object.fromEntries(nodes.map((node) => [node.node, node]));
  document.title = `${now.pipeline} – Headgate`;
  find("pipeline").textContent = now.pipeline;
  badge(now.ended?.outcome ?? progress?.state ?? "starting");
  find("since").textContent = progress ? `for ${duration(progress.uptime_ms)}` : "";
  find("wishes").hidden = !now.may_ask || now.ended !== null;
  if (now.ended) message(now.ended.text, now.ended.outcome === "failed");
  tiles(now, progress);
  curves(now.rates);
  draw(find("graph"), now.graph, byName, rateText);
  operators(nodes);
  loops(progress?.loops ?? []);
  const pending = progress?.pending_checkpoint;
  find("pending").hidden = !pending;
  if (pending) {
    const missing = pending.missing.length ? `, waiting for ${pending.missing.slice(0, 3).join(", ")}` : "";
    find("pending").textContent = `checkpoint ${pending.checkpoint} under way for ${duration(pending.age_ms)}${missing}`;
  }
  table("checkpoints", ["#id", "completed", "#duration", "#size"], now.checkpoints.toReversed().map(
    (one) => [one.checkpoint, clock(one.at_ms), duration(one.duration_ms), size(one.size_bytes)]));
  const happened = [
    ...now.restarts.map((one) => [one.at_ms, `restart after ${duration(one.delay_ms)}: ${one.reason}`]),
    ...now.notes.map((one) => [one.at_ms, one.text]),
  ].sort((a, b) => b[0] - a[0]);
  table("happened", ["", ""], happened.length ? happened.map(([at, text]) => [clock(at), text]) : [["", "nothing so far"]]);
  table("settings", ["", ""], now.settings);
}

function tiles(now, progress) {
  const last = now.rates.at(-1), checkpoint = now.checkpoints.at(-1);
  find("tiles").replaceChildren(
    tile("read", last ? `${count(last[1])}/s` : "–", "records"),
    tile("written", last ? `${count(last[2])}/s` : "–", "records"),
    tile("last checkpoint", checkpoint ? checkpoint.checkpoint : "–",
      checkpoint ? `${duration(checkpoint.duration_ms)}, ${size(checkpoint.size_bytes)}` : "none yet"),
    tile("watermark", progress?.watermark_ms ? moment(progress.watermark_ms).slice(11) : "–",
      progress?.watermark_ms ? `${moment(progress.watermark_ms).slice(0, 10)}, UTC` : "no event time"),
    tile("busiest worker", share(progress?.busy), "of its time"),
    tile("restarts", progress?.restarts ?? 0, progress ? `generation ${progress.generation}` : ""),
    tile("late, bad", progress ? `${count(progress.late_records)}, ${count(progress.bad_records)}` : "–", "records"),
  );
}

function operators(nodes) {
  const titles = ["operator", "#busy", "#held back", "#in/s", "#out/s", "#in", "#out", "#waiting", "#lag", "#late", "#bad", "#state"];
  const rows = nodes.toSorted((a, b) => (b.busy ?? 0) - (a.busy ?? 0)).map((node) => [
    node.node, share(node.busy), share(node.held_back),
    count(node.records_in_per_second), count(node.records_out_per_second), count(node.records_in), count(node.records_out),
    node.queued_batches ? size(node.queued_bytes) : null, node.lag_ms === null ? null : duration(node.lag_ms),
    node.late_records || null, node.bad_records || null, node.state_bytes ? size(node.state_bytes) : null,
  ]);
  table("operators", titles, rows);
}

function loops(found) {
  find("loops-section").hidden = found.length === 0;
  table("loops", ["loop", "#came back", "#waiting", "#on disk", "#trip", "#held back", "#round"], found.map((loop) => [
    loop.loop, count(loop.came_back), `${count(loop.queued_batches)} batches, ${size(loop.queued_bytes)}`,
    size(loop.spilled_bytes), duration(loop.trip_ms), duration(loop.throttled_ms), loop.round_ < 0 ? null : loop.round_,
  ]));
}

function badge(state) {
  find("state").textContent = state;
  find("state").className = `badge ${state}`;
}

function message(text, isBad) {
  find("message").hidden = false;
  find("message").textContent = text;
  find("message").className = isBad ? "bad" : "";
}

// ---- what people ask for

const QUESTIONS = {
  stop: "Stop the pipeline after a last checkpoint? The same command continues from there.",
  drain: "End the sources and process everything in flight? A drained pipeline has finished.",
};

async function ask(button) {
  const wish = button.dataset.wish, body = {};
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
    message("the pipeline's driver does not answer", true);
  } finally {
    button.disabled = false;
  }
}

for (const button of document.querySelectorAll("[data-wish]")) button.addEventListener("click", () => ask(button));

// ---- server-sent events, read with fetch: EventSource cannot send the token in a header

let isOver = false;

async function follow() {
  const answer = await fetch("/api/events", { headers });
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
    const last = events.filter((event) => event.startsWith("data: ")).at(-1);
    if (last) {
      const now = JSON.parse(last.slice("data: ".length));
      isOver = now.ended !== null;
      show(now);
    }
  }
}

while (!isOver) {
  try {
    await follow();
  } catch {
    // the driver is gone, or not there yet
  }
  if (isOver) break;
  badge("lost");
  await new Promise((done) => setTimeout(done, RETRY_MS));
}

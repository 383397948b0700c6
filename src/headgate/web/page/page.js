// Shows what /api/events tells of a run.

import { draw, svg } from "/graph.js";
import { showLogs } from "/logs.js";
import {
  ask, badge, clock, count, duration, find, follow, html, look, message, micros, moment, share, size, table, whole,
} from "/pieces.js";

// ---- pieces of the page

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

// What an edge says when somebody points at it. Within a chain it is a function call, which waits for nobody.
function edgeText(edge, now) {
  const ends = `${edge.from} → ${edge.to}`;
  if (edge.index === null) return `${ends}\n${edge.how === "one pass" ? "run as one pass" : "a function call: in one thread"}`;
  if (!now) return ends;
  const fill = edge.is_feedback ? "" : `, ${share(now.fill)} of what may`;
  return `${ends}\n${count(now.records_per_second)} records/s\nkeeps the receiver busy ${share(now.busy)} of its time
holds the sender back ${share(now.held_back)} of its time\n${now.queued_batches} batches, ${size(now.queued_bytes)} wait${fill}`;
}

function edgeRate(now, isCall) {
  const rate = isCall ? now?.records_in_per_second : now?.records_per_second;
  return rate === undefined ? "" : `${count(rate)}/s`;
}

// ---- the whole

function show(now) {
  const progress = now.progress, nodes = progress?.nodes ?? [];
  const byName = Object.fromEntries(nodes.map((node) => [node.node, node]));
  document.title = `${now.pipeline} – Headgate`;
  find("pipeline").textContent = now.pipeline;
  badge("state", now.ended?.outcome ?? progress?.state ?? "starting");
  find("since").textContent = progress ? `for ${duration(progress.uptime_ms)}` : "";
  find("wishes").hidden = !now.may_ask || now.ended !== null;
  if (now.ended) message(now.ended.text, now.ended.outcome === "failed");
  tiles(now, progress);
  curves(now.rates);
  const byIndex = Object.fromEntries((progress?.edges ?? []).map((edge) => [edge.edge, edge]));
  draw(find("graph"), now.graph, byName, byIndex, { node: rateText, edge: edgeText, rate: edgeRate });
  operators(nodes);
  sources(progress?.sources ?? []);
  loops(progress?.loops ?? []);
  const pending = progress?.pending_checkpoint;
  find("pending").hidden = !pending;
  if (pending) {
    const missing = pending.missing.length ? `, waiting for ${pending.missing.slice(0, 3).join(", ")}` : "";
    find("pending").textContent = `checkpoint ${pending.checkpoint} under way for ${duration(pending.age_ms)}${missing}`;
  }
  table("checkpoints", ["#id", "completed", "#duration", "#size", "#longest alignment"], now.checkpoints.toReversed().map(
    (one) => [one.checkpoint, clock(one.at_ms), duration(one.duration_ms), size(one.size_bytes), longestText(one.longest)]));
  completed = now.checkpoints;
  alignment();
  workers(progress?.workers ?? []);
  showLogs(now);
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
    node.node, node.runs_with ? `with ${node.runs_with}` : share(node.busy), share(node.held_back),
    count(node.records_in_per_second), count(node.records_out_per_second), count(node.records_in), count(node.records_out),
    node.queued_batches ? size(node.queued_bytes) : null, node.lag_ms === null ? null : duration(node.lag_ms),
    node.late_records || null, node.bad_records || null, node.state_bytes ? size(node.state_bytes) : null,
  ]);
  table("operators", titles, rows);
}

// A row for each source, with what is known of all its splits, and then its splits.
function sources(found) {
  find("sources-section").hidden = found.length === 0;
  const titles = ["source", "split", "#position", "#end", "#lag", "#records/s", "watermark", "event time", "#subtask"];
  const rows = found.flatMap((source) => {
    const [sizeOf, unit] = source.unit === "bytes" ? [size, ""] : [whole, " records"];
    const lagOf = (lag) => (lag === null ? "not known" : `${sizeOf(lag)}${unit}`);
    const openOf = (undecided) => (undecided ? `, ${sizeOf(undecided)} in open transactions` : "");
    const idle = [[source.idle_splits, "idle"], [source.waiting_splits, "waiting for slower ones"]]
      .filter(([number]) => number).map(([number, what]) => `${whole(number)} ${what}`).join(", ") || null;
    const unknown = source.lag !== null && source.unknown_lags ? ` and ${whole(source.unknown_lags)} not known` : "";
    const left = source.splits - source.most_lagging.length;
    const more = left > 0 ? `, ${whole(source.most_lagging.length)} of them here` : "";
    return [
      [source.source, `${whole(source.splits)} ${source.splits === 1 ? "split" : "splits"}${more}`, null, null,
        source.splits ? `${lagOf(source.lag)}${unknown}${openOf(source.undecided)}` : null, null, null, idle, null],
      ...source.most_lagging.map((split) => [
        null, split.split, split.position === null ? null : whole(split.position), split.end === null ? null : whole(split.end),
        lagOf(split.lag) + openOf(split.undecided), count(split.records_per_second), split.watermark_ms === null ? null : moment(split.watermark_ms),
        split.is_idle ? "idle" : split.is_waiting ? "waiting" : null, split.subtask,
      ]),
    ];
  });
  table("sources", titles, rows);
}

const longestText = (longest) => (longest ? `${micros(longest.aligned_us)}, ${longest.subtask}` : null);

// ---- alignment: of the checkpoint that was clicked, else of the newest one that workers have reported

let completed = [], chosen = null, aligned = null;

async function alignment() {
  const known = completed.filter((one) => one.longest).map((one) => one.checkpoint);
  const wanted = known.includes(chosen) ? chosen : known.at(-1);
  find("alignment-section").hidden = wanted === undefined;
  if (wanted === undefined || wanted === aligned) return;
  aligned = wanted;
  const found = await look(`/api/alignment/${wanted}`);
  if (!found || aligned !== wanted) return;
  const most = Math.max(1, ...found.subtasks.map((one) => one.aligned_us));
  find("alignment-of").textContent = `Alignment of checkpoint ${wanted}`;
  table("alignment", ["subtask", "#aligned for", "", "#state frozen in"], found.subtasks.map((one) => [
    one.subtask, micros(one.aligned_us), bar(one.aligned_us / most), micros(one.frozen_us)]));
  find("alignment-more").textContent = found.left_out ? `and ${found.left_out} that waited for less` : "";
}

function bar(part) {
  const full = svg("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none" });
  full.append(svg("rect", { width: 100, height: 8, class: "share" }),
    svg("rect", { width: Math.round(100 * part), height: 8, class: "share held" }));
  return full;
}

// The table is drawn anew while a button is held down, so a click may never come: pointerdown does.
find("checkpoints").addEventListener("pointerdown", (event) => {
  const number = Number(event.target.closest("tr")?.firstElementChild.textContent);
  if (!number) return;
  chosen = number === chosen ? null : number;
  alignment();
});

// ---- workers

function workers(found) {
  table("workers", ["#worker", "host", "#process", "#busy"], found.length
    ? found.map((one) => [one.worker, one.host, one.pid, share(one.busy)]) : [["", "none is there now", "", ""]]);
}

function loops(found) {
  find("loops-section").hidden = found.length === 0;
  table("loops", ["loop", "#came back", "#waiting", "#on disk", "#trip", "#held back", "#round"], found.map((loop) => [
    loop.loop, count(loop.came_back), `${count(loop.queued_batches)} batches, ${size(loop.queued_bytes)}`,
    size(loop.spilled_bytes), duration(loop.trip_ms), duration(loop.throttled_ms), loop.round_ < 0 ? null : loop.round_,
  ]));
}

for (const button of document.querySelectorAll("[data-wish]")) button.addEventListener("click", () => ask(button));

follow((now) => {
  show(now);
  return now.ended !== null;
}, () => badge("state", "lost"));

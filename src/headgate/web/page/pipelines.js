// Shows what /api/events tells of all pipelines of a machine, a card for each.

import { ask, badge, duration, find, follow, html, moment, size } from "/pieces.js";

const WISHES = { checkpoint: "Take a checkpoint", savepoint: "Savepoint …", drain: "Drain", stop: "Stop" };

function show(now) {
  const running = now.pipelines.filter((one) => one.state === "running").length;
  badge("state", running ? "running" : "idle");
  find("state").textContent = `${running} of ${now.pipelines.length} running`;
  const cards = now.pipelines.map((one) => cardOf(one, now.may_ask));
  find("pipelines").replaceChildren(...(cards.length ? cards : [html("section", { class: "wide" },
    "No pipeline is known yet. Start one with headgate run --ui 0 PROGRAM.py, and it appears here.")]));
  return false;
}

// A card stays as it is until something on it changes: whoever is about to click on it keeps what they look at.
const shown = new Map();

function cardOf(one, mayAsk) {
  const key = JSON.stringify([one.name, one.place]), content = JSON.stringify([one, mayAsk]);
  if (shown.get(key)?.content !== content) shown.set(key, { content, element: card(one, mayAsk) });
  return shown.get(key).element;
}

function card(one, mayAsk) {
  const name = one.page ? html("a", { href: one.page }, one.name) : one.name;
  const lines = [
    ["last checkpoint", one.checkpoint === null ? "none" : `${one.checkpoint} at ${moment(one.triggered_ms)} UTC`],
    ["took, size", one.checkpoint === null ? "–" : `${duration(one.duration_ms)}, ${size(one.size_bytes)}`],
    ["checkpoints in", one.place],
    [one.state === "running" ? "run by" : "last run by", one.owner || "–"],
    ["page", pageText(one)],
    ...(one.detail ? [[one.state === "failed" ? "failed with" : "note", one.detail]] : []),
  ];
  return html("section", { "data-pipeline": one.name },
    html("h3", {}, name, " ", html("span", { class: `badge ${one.state}` }, one.state)),
    html("table", { class: "facts" }, ...lines.map(([title, value]) =>
      html("tr", {}, html("td", {}, title), html("td", {}, value)))),
    ...(mayAsk && one.state === "running" ? [wishes(one)] : []));
}

function pageText(one) {
  if (one.page) return html("a", { href: one.page }, one.page);
  return one.state === "running" ? "none: it was started without --ui" : "–";
}

function wishes(one) {
  const buttons = Object.entries(WISHES).map(([wish, text]) => {
    const button = html("button", { "data-wish": wish }, text);
    button.addEventListener("click", () => ask(button, { pipeline: one.name, place: one.place }));
    return button;
  });
  return html("nav", {}, ...buttons);
}

follow(show, () => badge("state", "lost"));

// Draws operators and what flows between them: sources on the left, each operator behind all that feed it.

const WIDTH = 190, HEIGHT = 74, GAP_X = 92, GAP_Y = 30, MARGIN = 14, LOOP_ROOM = 88, SCALE_MIN = 0.6;
const BAR = 44, STROKE = 1.3, STROKE_MORE = 3.2; // an edge that is held back all the time is so much wider

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Returns {name: {x, y}} and the size of the whole. Feedback edges have no say in where an operator stands.
export function layout(graph) {
  const forward = graph.edges.filter((edge) => !edge.is_feedback);
  const depth = Object.fromEntries(graph.nodes.map((node) => [node.name, 0]));
  for (let round = 0; round < graph.nodes.length; round++) {
    let moved = false;
    for (const edge of forward) {
      if (depth[edge.to] < depth[edge.from] + 1 && depth[edge.from] < graph.nodes.length) {
        depth[edge.to] = depth[edge.from] + 1;
        moved = true;
      }
    }
    if (!moved) break;
  }
  const columns = [];
  for (const node of graph.nodes) (columns[depth[node.name]] ??= []).push(node.name);
  const row = {};
  columns.forEach((names) => {
    const wish = (name) => {
      const before = forward.filter((edge) => edge.to === name && edge.from in row).map((edge) => row[edge.from]);
      return before.length ? before.reduce((sum, one) => sum + one, 0) / before.length : 0;
    };
    const wishes = Object.fromEntries(names.map((name) => [name, wish(name)]));
    names.sort((a, b) => wishes[a] - wishes[b]);
    let free = 0;
    for (const name of names) {
      row[name] = Math.max(free, wishes[name]);
      free = row[name] + 1;
    }
  });
  const places = {};
  for (const node of graph.nodes) {
    places[node.name] = {
      x: MARGIN + depth[node.name] * (WIDTH + GAP_X),
      y: MARGIN + row[node.name] * (HEIGHT + GAP_Y),
    };
  }
  const rows = Math.max(0, ...Object.values(row)) + 1;
  const loops = graph.edges.some((edge) => edge.is_feedback) ? LOOP_ROOM : 0;
  return {
    places,
    width: 2 * MARGIN + columns.length * WIDTH + (columns.length - 1) * GAP_X,
    height: 2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP_Y + loops,
  };
}

// nodes and edges: what is measured of them, by name and by index; texts: how a node and an edge are told in words.
export function draw(target, graph, nodes, edges, texts) {
  const { places, width, height } = layout(graph);
  const parts = [arrow()];
  for (const edge of graph.edges) parts.push(drawnEdge(edge, places, height, nodes, edges, texts));
  for (const node of graph.nodes) parts.push(drawnNode(node, places[node.name], nodes[node.name], texts.node));
  target.setAttribute("width", width);
  target.setAttribute("height", height);
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.style.minWidth = `${Math.round(width * SCALE_MIN)}px`; // a wide graph is made smaller, then scrolled
  target.replaceChildren(...parts);
}

function arrow() {
  const head = svg("marker", {
    id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse",
  }, svg("path", { d: "M0 0 L8 4 L0 8 z" }));
  return svg("defs", {}, head);
}

// Returns the four points of the curve of an edge.
function curveOf(edge, places, height) {
  const from = places[edge.from], to = places[edge.to];
  if (edge.is_feedback) {
    const low = height - MARGIN, xa = from.x + WIDTH / 2, xb = to.x + WIDTH / 2;
    return [[xa, from.y + HEIGHT], [xa, low], [xb, low], [xb, to.y + HEIGHT + 2]];
  }
  const x1 = from.x + WIDTH, y1 = from.y + HEIGHT / 2, x2 = to.x, y2 = to.y + HEIGHT / 2;
  const bend = Math.max(30, (x2 - x1) / 2);
  return [[x1, y1], [x1 + bend, y1], [x2 - bend, y2], [x2 - 2, y2]];
}

// Returns where the words of an edge stand: in its middle, or in front of its end if it passes other operators.
function middleOf(curve) {
  const [start, one, other, end] = curve;
  const at = (t) => [0, 1].map((axis) => (1 - t) ** 3 * start[axis] + 3 * (1 - t) ** 2 * t * one[axis]
    + 3 * (1 - t) * t ** 2 * other[axis] + t ** 3 * end[axis]);
  let t = 0.5;
  while (t < 1 && end[0] - at(t)[0] > GAP_X / 2) t += 0.02;
  return at(t);
}

function drawnEdge(edge, places, height, nodes, edges, texts) {
  const now = edges[edge.index], held = now?.held_back ?? 0;
  const curve = curveOf(edge, places, height), [x, y] = middleOf(curve);
  const kind = edge.is_feedback ? "feedback" : edge.index === null ? "chained" : held > 0.01 ? "held-back" : "";
  const [start, ...more] = curve.map((point) => point.join(" "));
  const group = svg("g", { "data-edge": `${edge.from} → ${edge.to}` });
  const title = svg("title");
  title.textContent = texts.edge(edge, now);
  group.append(title, svg("path", {
    d: `M${start} C${more.join(" ")}`, class: `edge ${kind}`, "marker-end": "url(#arrow)",
    "stroke-width": STROKE + STROKE_MORE * held,
  }));
  const words = ["chained", "forward"].includes(edge.how) ? "" : edge.how;
  if (words) group.append(text(shortened(words, 16), x, y - 7));
  const rate = texts.rate(now ?? nodes[edge.to], edge.index === null);
  if (rate) group.append(text(rate, x, y + 15));
  if (now) group.append(...shareLine(now.busy, "busy", x, y + 24), ...shareLine(held, "held", x, y + 36));
  return group;
}

function text(words, x, y, anchor = "middle") {
  const found = svg("text", { x, y, class: "faint", "text-anchor": anchor });
  found.textContent = words;
  return found;
}

function shareLine(share, kind, x, y) {
  const left = x - BAR / 2 - 13;
  return [
    svg("rect", { x: left, y: y - 3, width: BAR, height: 5, rx: 2, class: "share" }),
    svg("rect", { x: left, y: y - 3, width: BAR * share, height: 5, rx: 2, class: `share ${kind}` }),
    text(`${Math.round(share * 100)} %`, left + BAR + 5, y + 3, "start"),
  ];
}

function drawnNode(node, place, now, texts) {
  const group = svg("g", { transform: `translate(${place.x} ${place.y})`, "data-operator": node.name });
  const title = svg("title");
  title.textContent = `${node.name} (${node.role})\n${node.columns}`;
  const name = svg("text", { x: 10, y: 20 });
  name.textContent = shortened(node.name, 26);
  const rate = svg("text", { x: 10, y: 38, class: "faint" });
  rate.textContent = now ? texts(node, now) : node.role;
  group.append(svg("rect", { width: WIDTH, height: HEIGHT, rx: 8, class: `box ${node.role}` }), title, name, rate);
  if (now?.runs_with) {
    const words = svg("text", { x: 10, y: 60, class: "faint" });
    words.textContent = shortened(`one pass with ${now.runs_with}`, 28);
    group.append(words);
  } else if (now && now.busy !== undefined) {
    const full = WIDTH - 20, busy = Math.min(1, now.busy), held = Math.min(1 - busy, now.held_back ?? 0);
    group.append(
      svg("rect", { x: 10, y: 52, width: full, height: 7, rx: 3, class: "share" }),
      svg("rect", { x: 10, y: 52, width: full * busy, height: 7, rx: 3, class: "share busy" }),
      svg("rect", { x: 10 + full * busy, y: 52, width: full * held, height: 7, rx: 3, class: "share held" }),
    );
  }
  return group;
}

function shortened(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

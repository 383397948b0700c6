// Draws operators and what flows between them: sources on the left, each operator behind all that feed it.

const WIDTH = 190, HEIGHT = 74, GAP_X = 90, GAP_Y = 26, MARGIN = 14, SCALE_MIN = 0.6;

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
  const loops = graph.edges.some((edge) => edge.is_feedback) ? 50 : 0;
  return {
    places,
    width: 2 * MARGIN + columns.length * WIDTH + (columns.length - 1) * GAP_X,
    height: 2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP_Y + loops,
  };
}

export function draw(target, graph, nodes, texts) {
  const { places, width, height } = layout(graph);
  const parts = [arrow()];
  for (const edge of graph.edges) parts.push(...drawnEdge(edge, places, height));
  for (const node of graph.nodes) parts.push(drawnNode(node, places[node.name], nodes[node.name], texts));
  target.setAttribute("width", width);
  target.setAttribute("height", height);
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.style.minWidth = `${Math.round(width * SCALE_MIN)}px`; // a wide graph is made smaller, then scrolled
  target.replaceChildren(...parts);
}

function arrow() {
  const head = svg("marker", {
    id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse",
  }, svg("path", { d: "M0 0 L8 4 L0 8 z" }));
  return svg("defs", {}, head);
}

function drawnEdge(edge, places, height) {
  const from = places[edge.from], to = places[edge.to];
  const x1 = from.x + WIDTH, y1 = from.y + HEIGHT / 2, x2 = to.x, y2 = to.y + HEIGHT / 2;
  if (edge.is_feedback) {
    const low = height + 20, xa = from.x + WIDTH / 2, xb = to.x + WIDTH / 2;
    const d = `M${xa} ${from.y + HEIGHT} C${xa} ${low} ${xb} ${low} ${xb} ${to.y + HEIGHT + 2}`;
    return [svg("path", { d, class: "edge feedback", "marker-end": "url(#arrow)" })];
  }
  const bend = Math.max(30, (x2 - x1) / 2);
  const d = `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2 - 2} ${y2}`;
  const path = svg("path", { d, class: `edge ${edge.how === "chained" ? "chained" : ""}`, "marker-end": "url(#arrow)" });
  if (edge.how === "chained" || edge.how === "forward") return [path];
  const label = svg("text", { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 6, class: "faint", "text-anchor": "middle" });
  label.textContent = shortened(edge.how, 14);
  return [path, label];
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
  if (now && now.busy !== undefined) {
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

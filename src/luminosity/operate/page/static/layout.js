// A layered layout of a graph without cycles: boxes in layers, few crossings, straight runs. As the plan's drawing.

const SWEEPS = 12;
const PLACE_SWEEPS = 24;

/**
 * Place boxes. `boxes` is [{id, across, along}] in writers-before-readers order, `links` [{from, to}]. "Along" is the
 * direction of the flow, "across" the other one. Returns {at: Map id → {across, along}, routes, across, along}: the
 * middles of boxes, and for each link the points [across, along] that it goes through.
 */
export function layOut(boxes, links, { between = 26, layerGap = 44, bendGap = 12 } = {}) {
  const sizes = new Map(boxes.map((box) => [box.id, box]));
  const depths = depthsOf(boxes, links);
  const rows = Array.from({ length: Math.max(-1, ...depths.values()) + 1 }, () => []);
  for (const box of boxes) rows[depths.get(box.id)].push({ id: box.id, size: box.across, up: [], down: [] });
  const spots = new Map(rows.flat().map((spot) => [spot.id, spot]));
  const forward = links.filter((link) => depths.get(link.to) > depths.get(link.from));
  const chains = forward.map((link) => {
    const chain = [spots.get(link.from)];
    for (let depth = depths.get(link.from) + 1; depth < depths.get(link.to); depth += 1) {
      const bend = { id: null, size: 0, up: [], down: [] };
      rows[depth].push(bend);
      chain.push(bend);
    }
    chain.push(spots.get(link.to));
    for (let at = 1; at < chain.length; at += 1) {
      chain[at - 1].down.push(chain[at]);
      chain[at].up.push(chain[at - 1]);
    }
    return { link, chain };
  });
  const ordered = order(rows);
  place(ordered, between, bendGap);
  return measured(ordered, chains, sizes, layerGap);
}

function depthsOf(boxes, links) {
  const depths = new Map(boxes.map((box) => [box.id, 0]));
  const incoming = new Map(boxes.map((box) => [box.id, []]));
  const outgoing = new Map(boxes.map((box) => [box.id, []]));
  for (const link of links) {
    incoming.get(link.to).push(link.from);
    outgoing.get(link.from).push(link.to);
  }
  for (const box of boxes) for (const from of incoming.get(box.id)) depths.set(box.id, Math.max(depths.get(box.id), depths.get(from) + 1));
  for (const box of boxes) {
    // A source stands right before its reader, not at the beginning of the picture.
    const readers = outgoing.get(box.id);
    if (!incoming.get(box.id).length && readers.length) depths.set(box.id, Math.min(...readers.map((id) => depths.get(id))) - 1);
  }
  return depths;
}

/** Sort each row by its neighbours, downwards and upwards, and keep the order with the fewest crossings. */
function order(rows) {
  let best = rows.map((row) => [...row]);
  let least = crossings(best);
  for (const beginsDown of [true, false]) {
    let tried = rows.map((row) => [...row]);
    for (let sweep = 0; sweep < SWEEPS && least > 0; sweep += 1) {
      tried = swept(tried, (sweep % 2 === 0) === beginsDown, Math.floor(sweep / 2) % 2 === 1);
      const now = crossings(tried);
      if (now < least) [best, least] = [tried, now];
    }
  }
  return best;
}

function swept(rows, isDown, flipsEquals) {
  const from = isDown ? rows : [...rows].reverse();
  const done = [from[0]];
  for (const row of from.slice(1)) {
    const places = new Map(done.at(-1).map((spot, index) => [spot, index]));
    const keys = new Map(row.map((spot, index) => {
      const near = (isDown ? spot.up : spot.down).map((each) => places.get(each)).filter((each) => each !== undefined);
      return [spot, near.length ? near.reduce((sum, each) => sum + each, 0) / near.length : index];
    }));
    const start = flipsEquals ? [...row].reverse() : [...row];
    done.push(start.sort((a, b) => keys.get(a) - keys.get(b)));
  }
  return isDown ? done : done.reverse();
}

function crossings(rows) {
  let found = 0;
  for (let at = 1; at < rows.length; at += 1) {
    const places = new Map(rows[at].map((spot, index) => [spot, index]));
    const ends = rows[at - 1].flatMap((spot) => spot.down.map((each) => places.get(each)).sort((a, b) => a - b));
    for (let i = 0; i < ends.length; i += 1) for (let j = i + 1; j < ends.length; j += 1) found += ends[i] > ends[j] ? 1 : 0;
  }
  return found;
}

/** Move each spot towards its neighbours as far as order and sizes allow. */
function place(rows, between, bendGap) {
  const gapsOf = (row) => row.slice(1).map((spot, index) => (row[index].size + spot.size) / 2 + (row[index].id === null && spot.id === null ? bendGap : between));
  const all = rows.map((row) => ({ row, gaps: gapsOf(row) }));
  for (const { row, gaps } of all) spread(row, row.map(() => 0), gaps);
  for (let sweep = 0; sweep < PLACE_SWEEPS; sweep += 1) {
    const isDown = sweep % 2 === 0;
    for (const { row, gaps } of isDown ? all : [...all].reverse()) {
      const wanted = row.map((spot) => {
        const near = isDown ? spot.up : spot.down;
        return near.length ? near.reduce((sum, each) => sum + each.x, 0) / near.length : spot.x;
      });
      spread(row, wanted, gaps);
    }
  }
}

/** Put a row to the places nearest to the wanted ones that keep its order and gaps: isotonic regression. */
function spread(row, wanted, gaps) {
  const blocks = [];
  let offset = 0;
  wanted.forEach((place, index) => {
    if (index) offset += gaps[index - 1];
    let block = { total: place - offset, size: 1 };
    while (blocks.length && blocks.at(-1).total / blocks.at(-1).size > block.total / block.size) {
      const before = blocks.pop();
      block = { total: before.total + block.total, size: before.size + block.size };
    }
    blocks.push(block);
  });
  const means = blocks.flatMap((block) => Array(block.size).fill(block.total / block.size));
  offset = 0;
  row.forEach((spot, index) => {
    if (index) offset += gaps[index - 1];
    spot.x = means[index] + offset;
  });
}

function measured(rows, chains, sizes, layerGap) {
  const left = Math.min(...rows.flat().map((spot) => spot.x - spot.size / 2), 0);
  const at = new Map();
  let along = 0;
  const middles = new Map();
  for (const row of rows) {
    const high = Math.max(0, ...row.map((spot) => (spot.id === null ? 0 : sizes.get(spot.id).along)));
    for (const spot of row) {
      spot.x -= left;
      middles.set(spot, { x: spot.x, y: along + high / 2, half: high / 2 });
      if (spot.id !== null) at.set(spot.id, { across: spot.x, along: along + high / 2 });
    }
    along += high + layerGap;
  }
  const across = Math.max(0, ...rows.flat().map((spot) => spot.x + spot.size / 2));
  const routes = chains.map(({ link, chain }) => {
    const points = [];
    chain.forEach((spot, index) => {
      const { x, y, half } = middles.get(spot);
      const own = spot.id === null ? half : sizes.get(spot.id).along / 2;
      if (index) points.push([x, y - own]);
      if (index < chain.length - 1) points.push([x, y + own]);
    });
    return { link, points };
  });
  return { at, routes, across, along: Math.max(0, along - layerGap) };
}

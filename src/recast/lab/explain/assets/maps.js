"use strict";
/* Attention maps from what the page stores (recast.lab.explain.scene): a query's weights over the pixels of a layer's input.

   gpsa:  A = c_S·S + c_G·G + c_C·C   S one-hot at the tap, G a Gaussian around Δ over the padded grid, C stored
   maps, classes:  stored as they are
   stored value = low + scale · (byte / 255)², of a block of pool × pool pixels, shared out evenly among them */
const Maps = (() => {
  async function unpack(packed) {
    const text = atob(packed.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    const all = await new Response(stream).arrayBuffer();
    const size = packed.blocks[0] * packed.blocks[1];
    const maps = all.byteLength / (size + 8); // a scale of 4 bytes for each map, and its least value
    const view = new DataView(all, 0, 8 * maps);
    const floats = (from) => Float32Array.from({ length: maps }, (_, i) => view.getFloat32(4 * (from + i), true));
    const shares = Float64Array.from({ length: 256 }, (_, byte) => (byte / 255) ** 2);
    return { ...packed, data: null, scale: floats(0), low: floats(maps), shares, bytes: new Uint8Array(all, 8 * maps) };
  }

  function nearest(values, target) {
    let best = 0;
    for (let i = 1; i < values.length; i++) if (Math.abs(values[i] - target) < Math.abs(values[best] - target)) best = i;
    return best;
  }

  // the pixel that lies at a position of the padded grid, −1 for padding
  function pixelAt([start, step, count], position) {
    const pixel = (position - start) / step;
    return Number.isInteger(pixel) && pixel >= 0 && pixel < count ? pixel : -1;
  }

  // one axis of G: softmax of −α(p − at − Δ)² over all padded positions p, of which the pixels are returned
  function gaussian(alpha, middle, padded, [start, step, count]) {
    const weights = new Float64Array(padded);
    let closest = Infinity;
    for (let p = 0; p < padded; p++) closest = Math.min(closest, (p - middle) ** 2);
    let sum = 0;
    for (let p = 0; p < padded; p++) sum += weights[p] = Math.exp(-alpha * ((p - middle) ** 2 - closest));
    return Float64Array.from({ length: count }, (_, i) => weights[start + step * i] / sum);
  }

  function addStored(out, layer, stored, head, [i, j], factor) {
    const [rows, columns] = [layer.keys[0][2], layer.keys[1][2]];
    const [down, right] = stored.blocks;
    const number = (head * stored.rows.length + nearest(stored.rows, i)) * stored.columns.length + nearest(stored.columns, j);
    const [scale, low] = [factor * stored.scale[number], factor * stored.low[number]];
    const first = number * down * right;
    const pool = stored.pool;
    for (let y = 0; y < rows; y++) {
      const high = Math.min(pool, rows - (y - y % pool));
      for (let x = 0; x < columns; x++) {
        const wide = Math.min(pool, columns - (x - x % pool));
        const byte = stored.bytes[first + Math.floor(y / pool) * right + Math.floor(x / pool)];
        out[y * columns + x] += (low + scale * stored.shares[byte]) / (high * wide);
      }
    }
  }

  function addPosition(out, layer, head, [i, j], shift, spread) {
    const columns = layer.keys[1][2];
    const at = [i, j].map((index, axis) => layer.queries[axis][0] + layer.queries[axis][1] * index);
    if (shift !== 0) {
      const [y, x] = at.map((position, axis) => pixelAt(layer.keys[axis], position + layer.offsets[head][axis]));
      if (y >= 0 && x >= 0) out[y * columns + x] += shift;
    }
    if (spread !== 0) {
      const [down, right] = at.map((position, axis) =>
        gaussian(layer.alpha[head], position + layer.center[head][axis], layer.padded[axis], layer.keys[axis]));
      for (let y = 0; y < down.length; y++)
        for (let x = 0; x < right.length; x++) out[y * columns + x] += spread * down[y] * right[x];
    }
  }

  // True if a head has the map of a view: it may lack content, but never its position
  const has = (layer, view, head) => view !== "content" || layer.gates[0][1][head] !== null;
  // heads of one tap: without content or a Gaussian, a head reads one pixel whatever the image is
  const isTap = (layer, head) => layer.kind === "gpsa" && layer.gates.every(([, values]) => values[head] === null);
  const views = (layer) => (layer.kind === "gpsa" ? ["mix", "position", "content"] : ["mix"]);

  // names of the maps: of the picture if they depend on it; empty if they are taps
  const names = (layer, stored) => (stored.names.length ? stored.names : layer.names);
  const heads = (layer, stored) => names(layer, stored).length || layer.offsets.length;

  // smallest and largest weight; even: all equal to the precision of a byte
  function range(values) {
    let [least, most] = [Infinity, -Infinity];
    for (const value of values) [least, most] = [Math.min(least, value), Math.max(most, value)];
    return { least, most, even: most - least <= 1e-3 * Math.max(Math.abs(most), Math.abs(least)) };
  }

  // Weights of a head for a query (its row and column on the query grid), over the pixels, row by row.
  function map(layer, stored, view, head, query) {
    const out = new Float32Array(layer.keys[0][2] * layer.keys[1][2]);
    if (layer.kind !== "gpsa") {
      addStored(out, layer, stored, head, query, 1);
      return out;
    }
    const [shift, spread] = [layer.shift ? layer.shift[head] : 0, layer.gaussian[head]];
    if (view === "content") addStored(out, layer, stored, head, query, 1);
    else if (view === "position") {
      const total = shift + spread || 1;
      addPosition(out, layer, head, query, shift / total, spread / total);
    } else {
      addPosition(out, layer, head, query, shift, spread);
      if (layer.content[head] !== 0) addStored(out, layer, stored, head, query, layer.content[head]);
    }
    return out;
  }

  // True if weights may be negative: shares of the linear gate may leave [0, 1]; other layers store it with their maps.
  function isSigned(layer, view, stored) {
    if (layer.kind !== "gpsa") return stored.signed;
    if (view === "content") return false;
    const shares = layer.gaussian.map((c, h) => {
      const shift = layer.shift ? layer.shift[h] : 0;
      const total = shift + c || 1;
      return view === "mix" ? [shift, c, layer.content[h]] : [shift / total, c / total];
    });
    return shares.some((of) => of.some((share) => share < -1e-6));
  }

  return { unpack, map, has, isTap, views, names, heads, range, isSigned, nearest };
})();

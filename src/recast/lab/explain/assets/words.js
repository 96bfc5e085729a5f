"use strict";
/* Text of the page: numbers, names of taps, sentences. */
const Words = (() => {
  const ARROWS = { "-1,-1": "↖", "-1,0": "↑", "-1,1": "↗", "0,-1": "←", "0,0": "•", "0,1": "→", "1,-1": "↙", "1,0": "↓", "1,1": "↘" };

  const percent = (p) => `${(100 * p).toFixed(p >= 0.0995 ? 0 : 1)}\u00a0%`;
  const number = (x) => {
    const size = Math.abs(x);
    const digits = size >= 100 ? 0 : size >= 0.01 ? 2 : 3;
    const text = size === 0 ? "0" : size >= 0.0005 ? size.toFixed(digits) : size.toExponential(0);
    return (x < 0 && Number(text) ? "−" : "") + text.replace("e-", "e−").replace("e+", "e");
  };

  const SCALES = { softmax: "softmax over exclusive classes", sigmoid: "sigmoid per class", logits: "logits" };
  const value = (scene, p) => (scene.scale === "logits" ? precise(p, 3) : percent(p));

  // two numbers with enough digits to differ
  const precise = (x, digits) => (x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)))).replaceAll("-", "−");
  const pair = (least, most) => {
    const digits = [2, 3, 4, 5].find((digits) => digits === 5 || least.toPrecision(digits) !== most.toPrecision(digits));
    return [least, most].map((x) => precise(x, digits));
  };

  function tap(of, names, head) {
    if (names.length) return names[head];
    const [down, right] = of.offsets[head];
    const arrow = ARROWS[`${Math.sign(down)},${Math.sign(right)}`];
    const [far, wide] = [Math.abs(down), Math.abs(right)];
    if (far <= 1 && wide <= 1) return arrow;
    if (far === wide || !far || !wide) return `${arrow}${Math.max(far, wide)}`;
    return `${ARROWS[`${Math.sign(down)},0`]}${far} ${ARROWS[`0,${Math.sign(right)}`]}${wide}`;
  }
  function tapInWords(of, names, head) {
    if (names.length) return names[head];
    const [down, right] = of.offsets[head];
    const words = [[down, "up", "down"], [right, "left", "right"]].filter(([by]) => by);
    return `tap ${words.length ? words.map(([by, less, more]) => `${Math.abs(by)} ${by < 0 ? less : more}`).join(", ") : "in the middle"}`;
  }
  function taps(of, count, heads) {
    const kernel = of.kernel.join("×");
    if (count === heads) return `All ${heads} heads are taps of the ${kernel} convolution: each reads one pixel, whatever the image is.`;
    return `The other ${count} heads are taps of the ${kernel} convolution (grey): each reads one pixel, whatever the image is.`;
  }
  function largest(values, columns) {
    let at = 0;
    for (let i = 1; i < values.length; i++) if (Math.abs(values[i]) > Math.abs(values[at])) at = i;
    return { value: values[at], row: Math.floor(at / columns), column: at % columns };
  }

  // the chosen map: range of its colours, largest weight
  function range({ of, maps, names, signed, namesState }, chosen) {
    const { least, most, even } = Maps.range(maps[chosen]);
    const top = largest(maps[chosen], of.keys[1][2]);
    const name = names[chosen]; // may be the name of a class: as it is written
    if (even) return `${name}: a uniform map, every weight is ${precise(most, 2)}.`;
    const drawn = signed ? "colours end at the largest, of either sign" : "drawn from its smallest to its largest (min–max)";
    const outside = 1 - maps[chosen].reduce((sum, value) => sum + value, 0);
    const spread = (most - least) / (Math.abs(most + least) || 1); // half the range, relative to the middle
    const flat = !signed && spread < 0.05 ? ` Nearly uniform: all weights are within ${percent(spread)} of their middle; the colours exaggerate the differences.` : "";
    const rest = !signed && !namesState && outside > 0.01 ? ` ${percent(outside)} falls on tokens, not on the image.` : "";
    return `${name}: weights from ${pair(least, most).join(" to ")}, ${drawn}.${flat}${rest} Largest at row ${top.row + 1}, column ${top.column + 1} of ${of.keys[0][2]}×${of.keys[1][2]}.`;
  }
  const capital = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}`;

  // gates of the maps that a head has
  const gates = (of, head) => of.gates.map(([symbol, values]) => [symbol, values[head]]).filter(([, value]) => value !== null);

  // the chosen head: gates, largest weight, weight on the padding
  function head(shown, chosen) {
    const { of, maps, names } = shown;
    const isClasses = of.kind === "classes";
    if (chosen < 0 || chosen >= maps.length) {
      if (!maps.some(Boolean)) return "";
      return isClasses ? "Choose a map to lay it over the image. Each map is drawn from its smallest weight to its largest." : `Choose ${maps.length > 1 ? "a" : "the"} head to lay its map over the image.`;
    }
    if (isClasses) return range(shown, chosen);
    const values = maps[chosen];
    const words = capital(tapInWords(of, names, chosen));
    const list = gates(of, chosen).map(([symbol, value]) => `${symbol} = ${number(value)}${!symbol.includes("γ") || value > 0 ? "" : value < 0 ? " (its content is subtracted)" : " (closed: its map does not reach the output)"}`).join(", ");
    const about = `${words}${list ? `: ${list}` : ""}. `;
    if (!values) return `${about}This head has no content map.`;
    const top = largest(values, of.keys[1][2]);
    const outside = 1 - values.reduce((sum, value) => sum + value, 0);
    return `${about}Largest weight ${number(top.value)} at row ${top.row + 1}, column ${top.column + 1}` +
      `${(of.kind === "gpsa" || !shown.signed) && outside > 0.01 ? `; ${percent(outside)} falls on ${of.offsets.length ? "the padding around the image" : "the tokens before the patches"}` : ""}.`;
  }

  // reason why a layer has no maps of an image
  function absent(scene, name) {
    if (!scene.order.length) return "This network has no recast layer, no attention pooling and no attention over tokens, so only its predictions are shown. To add attention pooling, use recast.attention_pool_(model) or recast train attention_pool_quick.";
    return `${name} has no maps of this image: the outputs are not finite.`;
  }

  // predictions of all networks in one sentence
  function verdict(scene, arms, predictions, at) {
    if (!arms.length) return `Where the network looks in ${at.name}`;
    const yes = (of) => of.filter(([, p]) => p >= 0.5).map(([label]) => label).join(", ") || (of.length === 1 ? `not ${of[0][0]}` : "none of its classes");
    const top = ([[label, p]]) => (scene.scale === "logits" ? `${label} (${value(scene, p)})` : label);
    const best = arms.map((arm) => (scene.scale === "sigmoid" ? yes : top)(predictions[arm]));
    const main = arms.indexOf("recast") < 0 ? arms.length - 1 : arms.indexOf("recast");
    const label = at.label === null ? "" : ` The label is ${at.label}.`;
    const many = { 2: "Both networks predict", 3: "All three networks predict" }[arms.length];
    if (many && new Set(best).size === 1) return `${many} ${best[0]}${best[0] === at.label ? ", which is the label." : `.${label}`}`;
    const others = arms.map((arm, i) => [arm, i]).filter(([, i]) => i !== main).map(([arm, i]) => {
      const name = { parent: "the parent", finetuned: "the fine-tuned parent" }[arm] || scene.arms[arm];
      return `${name} ${best[i]}`;
    });
    return `${arms.length > 1 ? scene.arms[arms[main]] : "The network"} predicts ${[best[main], ...others].join(", ")}.${label}`;
  }

  function formula(scene) {
    const all = Object.values(scene.layers);
    const parts = [];
    if (all.some((of) => of.shift)) parts.push("A = (1−γ)·[(1−s)·S + s·G] + γ·C: γ is the gate of the content map C, and s is how far the tap has spread to a Gaussian of span 1/α. At γ = s = 0 a head equals its tap of the convolution. Both are unbounded: a negative gate subtracts its map. The weights of a head sum to one, but single weights may be negative or above 1.");
    if (all.some((of) => of.gates.some(([, values]) => values.includes(null)))) parts.push("A head shows only the gates of maps that it has: without a content map it has no share of content, without a Gaussian no s and no 1/α.");
    if (all.some((of) => of.kind === "gpsa" && !of.shift)) parts.push("A = σ(λ)·G + (1−σ(λ))·C: 1−σ(λ) is the share of content, and 1/α is the span of the Gaussian.");
    if (all.some((of) => of.kind === "maps" && of.gates.length)) parts.push("Beside a convolution: y = conv(X) + γ·C·X·W, where C is the content map and γ its factor. At γ = 0 the layer is the convolution; a negative γ subtracts the content.");
    if (all.some((of) => of.kind === "maps" && of.offsets.length)) parts.push("C-MHSA: position is a learned bias inside the softmax of the content, so only the whole map can be shown.");
    if (all.some((of) => of.kind !== "classes")) parts.push("With a query, a map shows how a head weighs the pixels (or patches) of its layer’s input for the outlined one. The largest weights saturate the colour scale, so that small weights stay visible.");
    if (Object.entries(scene.layers).some(([name, of]) => of.kind === "classes" && name !== "Grad-CAM")) parts.push("Without a query, a map shows how a token weighs the places of the image: a single pooling token, a token per class, or the class token in each head. It is drawn over the grey image from its smallest weight to its largest. Colours of two maps cannot be compared; the numbers below them can. Attention on the token itself is not drawn.");
    if (scene.order.includes("Grad-CAM")) parts.push("Grad-CAM is not attention: it sums the channels of the last map, weighted by how much they raise the logit of the class, and clips negative values to 0. All networks show the same classes, the likeliest of the network whose heads are shown.");
    if (all.length) parts.push("A position in an inner layer already contains information from its surroundings: a map shows where a layer looks, not what the prediction depends on.");
    return parts.join(" ");
  }

  return { SCALES, number, value, pair, percent, tap, taps, range, tapInWords, largest, gates, head, absent, verdict, formula };
})();

"use strict";
/* What the page says: numbers, places of taps, sentences. */
const Words = (() => {
  const ARROWS = { "-1,-1": "↖", "-1,0": "↑", "-1,1": "↗", "0,-1": "←", "0,0": "•", "0,1": "→", "1,-1": "↙", "1,0": "↓", "1,1": "↘" };

  const percent = (p) => `${(100 * p).toFixed(p >= 0.0995 ? 0 : 1)} %`;
  const number = (x) => {
    const size = Math.abs(x);
    const digits = size >= 100 ? 0 : size >= 0.01 ? 2 : 3;
    const text = size === 0 ? "0" : size >= 0.0005 ? size.toFixed(digits) : size.toExponential(0);
    return (x < 0 && Number(text) ? "−" : "") + text.replace("e-", "e−").replace("e+", "e");
  };

  const SCALES = { softmax: "softmax: one class is right", sigmoid: "sigmoid: each on its own", logits: "logits, as they are" };
  const value = (scene, p) => (scene.scale === "logits" ? precise(p, 3) : percent(p));

  // two numbers, with as many digits as tell them apart
  const precise = (x, digits) => (x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)))).replaceAll("-", "−");
  const pair = (least, most) => {
    const digits = [2, 3, 4, 5].find((digits) => digits === 5 || least.toPrecision(digits) !== most.toPrecision(digits));
    return [least, most].map((x) => precise(x, digits));
  };

  function tap(of, names, head) {
    if (names.length) return names[head];
    const [down, right] = of.offsets[head];
    return ARROWS[`${down},${right}`] || `${number(down)},${number(right)}`;
  }
  function tapInWords(of, names, head) {
    if (names.length) return names[head];
    const [down, right] = of.offsets[head];
    const words = [[down, "up", "down"], [right, "left", "right"]].filter(([by]) => by);
    return `tap ${words.length ? words.map(([by, less, more]) => `${Math.abs(by)} ${by < 0 ? less : more}`).join(", ") : "in the middle"}`;
  }
  function largest(values, columns) {
    let at = 0;
    for (let i = 1; i < values.length; i++) if (Math.abs(values[i]) > Math.abs(values[at])) at = i;
    return { value: values[at], row: Math.floor(at / columns), column: at % columns };
  }

  // of the chosen map: where its colours begin and end, its largest weight
  function range({ of, maps, names, signed, told }, chosen) {
    const { least, most, even } = Maps.range(maps[chosen]);
    const top = largest(maps[chosen], of.keys[1][2]);
    const name = capital(names[chosen] || "");
    if (even) return `${name}: an even map, every weight is ${precise(most, 2)}.`;
    const drawn = signed ? "colours end at the largest, of either sign" : "drawn from its smallest to its largest (min–max)";
    const outside = 1 - maps[chosen].reduce((sum, value) => sum + value, 0);
    const spread = (most - least) / (Math.abs(most + least) || 1); // half the range, of the middle
    const flat = !signed && spread < 0.05 ? ` Nearly even: no weight is further than ${percent(spread)} from the middle of them; the colours make small differences large.` : "";
    const rest = !signed && !told && outside > 0.01 ? ` ${percent(outside)} falls on tokens, not on the image.` : "";
    return `${name}: weights from ${pair(least, most).join(" to ")}, ${drawn}.${flat}${rest} Largest at row ${top.row + 1}, column ${top.column + 1} of ${of.keys[0][2]}×${of.keys[1][2]}.`;
  }
  const capital = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}`;

  // of the chosen head: gates, largest weight, what falls on the padding
  function head(shown, chosen) {
    const { of, maps, names } = shown;
    const isClasses = of.kind === "classes";
    if (chosen < 0 || chosen >= maps.length) {
      return isClasses ? "Choose a map to lay it over the image. Each is drawn from its own smallest weight to its own largest." : "Choose a head to lay its map over the image.";
    }
    if (isClasses) return range(shown, chosen);
    const values = maps[chosen];
    const top = largest(values, of.keys[1][2]);
    const outside = 1 - values.reduce((sum, value) => sum + value, 0);
    const gates = of.gates.map(([symbol, of]) => `${symbol} = ${number(of[chosen])}${symbol === "γ" && of[chosen] < 0 ? " (its content is subtracted)" : ""}`).join(", ");
    const words = tapInWords(of, names, chosen);
    return `${capital(words)}${gates ? `: ${gates}` : ""}. ` +
      `Largest weight ${number(top.value)} at row ${top.row + 1}, column ${top.column + 1}` +
      `${(of.kind === "gpsa" || !shown.signed) && outside > 0.01 ? `; ${percent(outside)} falls on ${of.offsets.length ? "the padding around the image" : "the tokens before the patches"}` : ""}.`;
  }

  // why a layer has no maps at a state
  function absent(scene, at, name) {
    if (!scene.order.length) return "This network has no recast layer, no attention pooling and no attention over tokens whose maps could be drawn: only its predictions are shown. recast.attention_pool_(model), or recast train attention_pool_quick, gives it a pooling that can be looked at.";
    const epoch = scene.states[at].epoch;
    const later = scene.states.find((state, i) => i > at && state.layers[name]);
    const convolution = later && later.layers[name].offsets.length;
    return `At epoch ${epoch}, ${name} ${convolution ? "is still a convolution: it " : ""}has no attention maps.` + (later ? ` It has them at epoch ${later.epoch}.` : "");
  }

  // who says what, in one sentence
  function verdict(scene, arms, found, at) {
    if (!arms.length) return `Where the network looks in ${at.name}`;
    const yes = (of) => of.filter(([, p]) => p >= 0.5).map(([label]) => label).join(", ") || (of.length === 1 ? `not ${of[0][0]}` : "none of its classes");
    const top = ([[label, p]]) => (scene.scale === "logits" ? `${label} ${value(scene, p)}` : label);
    const best = arms.map((arm) => (scene.scale === "sigmoid" ? yes : top)(found[arm]));
    const own = arms.indexOf("recast") < 0 ? arms.length - 1 : arms.indexOf("recast");
    const label = at.label === null ? "" : ` The label is ${at.label}.`;
    const many = { 2: "Both networks say", 3: "All three networks say" }[arms.length];
    if (many && new Set(best).size === 1) return `${many} ${best[0]}${best[0] === at.label ? ", as it is labelled." : `.${label}`}`;
    const others = arms.map((arm, i) => [arm, i]).filter(([, i]) => i !== own).map(([arm, i]) => {
      const who = { parent: "the parent", finetuned: "the fine-tuned parent" }[arm] || scene.arms[arm];
      return `${who} ${best[i]}`;
    });
    return `${arms.length > 1 ? scene.arms[arms[own]] : "The network"} says ${[best[own], ...others].join(", ")}.${label}`;
  }

  function formula(scene) {
    const all = scene.states.flatMap((state) => Object.values(state.layers));
    const said = [];
    if (all.some((of) => of.shift)) said.push("A = (1−γ)·[(1−s)·S + s·G] + γ·C: γ is the gate of the content map C, s how far the tap has spread to a Gaussian of span 1/α. At γ = s = 0 a head is its tap of the convolution. Both are free: below 0 a gate subtracts its map, and what a head gives to its maps sums to one, so that single weights may be negative or above 1.");
    if (all.some((of) => of.kind === "gpsa" && !of.shift)) said.push("A = σ(λ)·G + (1−σ(λ))·C: 1−σ(λ) is the share of content, 1/α the span of the Gaussian.");
    if (all.some((of) => of.kind === "maps" && of.offsets.length)) said.push("C-MHSA: position is a learned bias inside the softmax of the content, so only the whole can be shown.");
    if (all.some((of) => of.kind !== "classes")) said.push("With a query, a map shows how a head weighs the pixels (or patches) of its layer’s input for the outlined one. Colours end before the largest weights do, so that small ones can be seen.");
    if (Object.values(scene.states).some((state) => Object.entries(state.layers).some(([name, of]) => of.kind === "classes" && name !== "Grad-CAM"))) said.push("Without a query, a map shows how a token of the network weighs the places of the image: one that everything is pooled into, one for each class, or the class token in each head. It is drawn from its own smallest weight to its own largest, over the grey image, so that colours of two maps cannot be compared; the numbers below can. What falls on the token itself is left out.");
    if (scene.order.includes("Grad-CAM")) said.push("Grad-CAM is no attention: the last map’s channels are added up by how much they raise the logit of the class named, and what lowers it is 0. The classes are the likeliest of the network whose heads are shown, in every network the same.");
    if (all.length) said.push("A place of an inner layer has seen its surroundings: a map tells where the network looks there, and proves nothing about what its answer depends on.");
    return said.join(" ");
  }

  return { SCALES, number, value, pair, percent, tap, range, tapInWords, largest, head, absent, verdict, formula };
})();

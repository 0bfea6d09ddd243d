/** Every adapter on every kind of digits, by one session. */

import * as ort from "./ort/ort.wasm.min.mjs";
import { AdaptedModel } from "./adapters/negative/adapters.mjs";
import { readNpz } from "./adapters/negative/host.mjs";

const folder = (/** @type {string} */ name) => new URL(`adapters/${name}/`, location.href);
const ADAPTERS = ["negative", "upside-down"];
const CELLS = 64; // of 8×8 pixels, whose largest value is 16
/** @type {Record<string, (pixels: number[]) => number[]>} */
const KINDS = {
  "as they are": (pixels) => pixels,
  negative: (pixels) => pixels.map((value) => 1 - value),
  "upside-down": (pixels) => pixels.toReversed(),
};

/** The share of rows whose largest score is that of their label. @param {any} scores @param {any} labels */
function share(scores, labels) {
  const width = scores.dims[1];
  const best = Array.from(labels, (_, row) => {
    const of = [...scores.data.subarray(row * width, (row + 1) * width)];
    return of.indexOf(Math.max(...of));
  });
  return best.filter((label, row) => label === labels[row]).length / labels.length;
}

/** @param {string} kind @param {string[]} cells */
function row(kind, cells) {
  const made = document.createElement("tr");
  for (const text of cells) made.append(Object.assign(document.createElement(kind), { textContent: text }));
  return made;
}

try {
  const model = await AdaptedModel.load(folder(ADAPTERS[0]), { ort, threads: 1 });
  await Promise.all(ADAPTERS.map((name) => model.add(name, folder(name))));
  const answer = await fetch("digits.npz");
  const data = await readNpz(new Uint8Array(await answer.arrayBuffer()));
  const [images, labels] = ["test_images", "test_labels"].map((name) => data.get(name)?.data);
  const choices = [null, ...ADAPTERS];
  document.querySelector("thead")?.append(row("th", ["digits", ...choices.map((name) => name ?? "no adapter")]));
  for (const [kind, change] of Object.entries(KINDS)) {
    const values = new Float32Array(images.length);
    for (let at = 0; at < images.length; at += CELLS)
      values.set(change(Array.from(images.subarray(at, at + CELLS), (value) => value / 16)), at);
    const feeds = { images: new ort.Tensor("float32", values, [labels.length, 1, 8, 8]) };
    const shares = [];
    for (const name of choices) shares.push(share((await model.run(feeds, name)).scores, labels));
    document.querySelector("tbody")?.append(row("td", [kind, ...shares.map((n) => `${(100 * n).toFixed(1)} %`)]));
  }
  document.body.dataset.state = "ready";
} catch (error) {
  const problem = /** @type {HTMLElement} */ (document.querySelector("#problem"));
  [problem.hidden, problem.innerText] = [false, String(error)];
  document.body.dataset.state = "failed";
}

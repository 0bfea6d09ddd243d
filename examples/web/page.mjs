/**
 * The page: paper, the step models run by host.mjs, and what shows how it goes.
 *
 * @typedef {import("./strokes.mjs").Stroke} Stroke
 * @typedef {{strokes: Stroke[], label: number}} Drawing
 */

import { Host, HostError, readNpz, scalar } from "./device/host.mjs";
import { SIDE, pixels, varied } from "./strokes.mjs";

const BATCH = 32;
const STEPS_OF_OWN = 320;
const EPOCHS_OF_PACKAGED = 4;
const THREADS = 4;

/** @param {string} id @returns {any} */
const element = (id) => document.getElementById(id);
const DIGITS = [...Array(10).keys()];

/** @type {any} */ let ort;
/** @type {Host} */ let host;
/** @type {Uint8Array} */ let untrained;
/** @type {Record<"train" | "test", {images: Float32Array, labels: number[]}>} */ let packaged;
/** @type {Drawing[]} */ const drawings = [];
/** @type {Stroke[]} */ let strokes = [];
/** @type {number | null} */ let guessed = null;
/** @type {boolean[]} */ let fresh = [];
/** @type {number[]} */ let losses = [];
let stopped = false;

// The network

/** What it makes of pictures: scores of each. @param {Float32Array} images @returns {Promise<number[][]>} */
async function scoresOf(images) {
  const rows = images.length / SIDE ** 2;
  const { scores } = await host.infer({ images: { type: "float32", data: images, dims: [rows, 1, SIDE, SIDE] } });
  const { data } = scores;
  return Array.from({ length: rows }, (_, row) => [...data.subarray(row * 10, row * 10 + 10)]);
}

/** @param {number[]} scores */
const largest = (scores) => scores.indexOf(Math.max(...scores));

/** One step on rows of pictures; its loss. @param {Float32Array[]} images @param {number[]} labels */
async function step(images, labels) {
  const data = new Float32Array(images.length * SIDE ** 2);
  images.forEach((image, row) => data.set(image, row * SIDE ** 2));
  const found = await host.step({
    images: { type: "float32", data, dims: [images.length, 1, SIDE, SIDE] },
    labels: { type: "int64", data: BigInt64Array.from(labels, BigInt), dims: [labels.length] },
  });
  return scalar(found[host.contract.loss]);
}

/** @param {number} count */
function shuffled(count) {
  const order = [...Array(count).keys()];
  for (let at = count - 1; at > 0; at--) {
    const other = Math.floor(Math.random() * (at + 1));
    [order[at], order[other]] = [order[other], order[at]];
  }
  return order;
}

/** Batches of the drawings, each time as they could have been drawn as well. */
function* batchesOfOwn() {
  for (let taken = 0; taken < STEPS_OF_OWN; ) {
    const order = Array.from({ length: Math.ceil(BATCH / drawings.length) }, () => shuffled(drawings.length)).flat();
    for (let low = 0; low + BATCH <= order.length && taken < STEPS_OF_OWN; low += BATCH, taken++) {
      const rows = order.slice(low, low + BATCH).map((row) => drawings[row]);
      yield { images: rows.map((row) => varied(row.strokes)), labels: rows.map((row) => row.label) };
    }
  }
}

/** Batches of the packaged digits. */
function* batchesOfPackaged() {
  const { images, labels } = packaged.train;
  for (let epoch = 0; epoch < EPOCHS_OF_PACKAGED; epoch++) {
    const order = shuffled(labels.length);
    for (let low = 0; low < order.length; low += BATCH) {
      const rows = order.slice(low, low + BATCH);
      yield {
        images: rows.map((row) => images.subarray(row * SIDE ** 2, (row + 1) * SIDE ** 2)),
        labels: rows.map((row) => labels[row]),
      };
    }
  }
}

/**
 * @param {Iterable<{images: Float32Array[], labels: number[]}>} batches @param {number} total @param {string} what
 */
async function train(batches, total, what) {
  state("training");
  element("problem").hidden = true;
  [stopped, fresh] = [false, []];
  const [start, first] = [performance.now(), losses.length];
  let shown = start;
  for (const { images, labels } of batches) {
    losses.push(await step(images, labels));
    const now = performance.now();
    if (now - shown > 60) {
      shown = now;
      showTraining(losses.length - first, total);
      await new Promise(requestAnimationFrame); // so that the page can be seen, and stopped
    }
    if (stopped) break;
  }
  const steps = losses.length - first;
  showTraining(steps, stopped ? steps : total);
  const seconds = (performance.now() - start) / 1000;
  element("news").textContent =
    `${stopped ? "Stopped after" : "Took"} ${steps} steps on ${what}, in ${seconds.toFixed(1)} s ` +
    `(${((1000 * seconds) / steps).toFixed(1)} ms each). Now draw some more.`;
  showFresh();
  await check();
  await look();
  state("ready");
}

// What is shown

/** @param {"loading" | "ready" | "training" | "failed"} name */
function state(name) {
  document.body.dataset.state = name;
  const ready = name === "ready";
  for (const id of ["train-packaged", "reset", "download"]) element(id).disabled = !ready;
  element("train-own").disabled = !ready || !drawings.length;
  element("stop").hidden = name !== "training";
}

/** @param {number} done @param {number} total */
function showTraining(done, total) {
  element("progress").value = done / total;
  element("news").textContent = `step ${done} of ${total}`;
  const most = Math.max(...losses, 1e-6);
  const points = losses.map((loss, k) => `${(400 * k) / Math.max(losses.length - 1, 1)},${108 - (104 * loss) / most}`);
  element("curve").innerHTML = losses.length ? `<polyline points="${points.join(" ")}" />` : "";
  element("loss").textContent = losses.length ? `now ${losses[losses.length - 1].toFixed(3)}` : "none yet";
}

/**
 * @param {CanvasRenderingContext2D} target @param {ArrayLike<number>} image @param {number} x @param {number} y
 * @param {number[]} color
 */
function paint(target, image, x = 0, y = 0, color = [255, 255, 255]) {
  const data = new ImageData(SIDE, SIDE);
  for (let k = 0; k < SIDE ** 2; k++) data.data.set(color.map((c) => 16 + (c - 16) * image[k]).concat(255), 4 * k);
  target.putImageData(data, x, y);
}

function showFresh() {
  const right = fresh.filter(Boolean).length;
  element("fresh").textContent = fresh.length ? `${right} of ${fresh.length}` : "–";
}

/** Scores of the digits that it was never trained on. */
async function check() {
  const { images, labels } = packaged.test;
  const found = (await scoresOf(images)).map(largest);
  const right = labels.filter((label, row) => label === found[row]).length;
  element("held-out").textContent = `${((100 * right) / labels.length).toFixed(1)} %`;
  const [columns, gap] = [18, 2];
  const cell = SIDE + gap;
  const small = new OffscreenCanvas(columns * cell, Math.ceil(labels.length / columns) * cell);
  const target = /** @type {any} */ (small.getContext("2d"));
  target.fillStyle = "#101010";
  target.fillRect(0, 0, small.width, small.height);
  labels.forEach((label, row) => {
    const image = images.subarray(row * SIDE ** 2, (row + 1) * SIDE ** 2);
    const color = found[row] === label ? [120, 225, 175] : [255, 110, 100];
    paint(target, image, (row % columns) * cell + 1, Math.floor(row / columns) * cell + 1, color);
  });
  const sheet = element("sheet");
  const shown = sheet.getContext("2d");
  shown.imageSmoothingEnabled = false;
  shown.drawImage(small, 0, 0, sheet.width, sheet.height);
}

/** What it makes of the paper. */
async function look() {
  const drawn = strokes;
  const image = drawn.length ? pixels(drawn) : new Float32Array(SIDE ** 2);
  paint(element("seen").getContext("2d"), image);
  const scores = drawn.length ? (await scoresOf(image))[0] : DIGITS.map(() => -Infinity);
  if (drawn !== strokes) return; // drawn on meanwhile
  guessed = drawn.length ? largest(scores) : null;
  element("guess").textContent = guessed ?? "?";
  const exps = scores.map((score) => (guessed === null ? 0 : Math.exp(score - scores[guessed])));
  const sum = exps.reduce((a, b) => a + b, 0) || 1;
  [...element("scores").children].forEach((row, digit) => {
    row.lastChild.style.width = `${(70 * exps[digit]) / sum}%`;
  });
}

function showDrawings() {
  const sorted = [...drawings].sort((a, b) => a.label - b.label);
  element("drawings").replaceChildren(
    ...sorted.map((drawing) => {
      const button = document.createElement("button");
      button.title = `a ${drawing.label}; press to take it away`;
      const canvas = button.appendChild(document.createElement("canvas"));
      canvas.width = canvas.height = SIDE;
      paint(/** @type {any} */ (canvas.getContext("2d")), pixels(drawing.strokes));
      button.onclick = () => {
        drawings.splice(drawings.indexOf(drawing), 1);
        showDrawings();
      };
      return button;
    }),
  );
  element("train-own").disabled = document.body.dataset.state !== "ready" || !drawings.length;
}

/** @param {unknown} error */
function problem(error) {
  if (document.body.dataset.state === "training") state("ready");
  element("problem").hidden = false;
  element("problem").textContent = error instanceof HostError ? error.message : String(error);
  if (!(error instanceof HostError)) throw error;
}

// Paper

function redraw() {
  const paper = element("paper");
  const target = paper.getContext("2d");
  target.clearRect(0, 0, paper.width, paper.height);
  Object.assign(target, { lineWidth: 40, lineCap: "round", lineJoin: "round", strokeStyle: "#fff" });
  for (const stroke of strokes) {
    target.beginPath();
    for (const [x, y] of [stroke[0], ...stroke]) target.lineTo(x * paper.width, y * paper.height);
    target.stroke();
  }
}

function wipe() {
  strokes = [];
  redraw();
  return look();
}

/** Keep what is on the paper as a `label`. @param {number} label */
async function keep(label) {
  if (!strokes.length || document.body.dataset.state !== "ready") return;
  await look(); // its guess, before it is told
  fresh.push(guessed === label);
  drawings.push({ strokes, label });
  showFresh();
  showDrawings();
  await wipe();
}

function listen() {
  const paper = element("paper");
  let down = false;
  const point = (/** @type {PointerEvent} */ { clientX, clientY }) => {
    const { x, y, width, height } = paper.getBoundingClientRect();
    return /** @type {[number, number]} */ ([(clientX - x) / width, (clientY - y) / height]);
  };
  paper.onpointerdown = (/** @type {PointerEvent} */ event) => {
    paper.setPointerCapture(event.pointerId);
    [down, strokes] = [true, [...strokes, [point(event)]]];
    redraw();
  };
  paper.onpointermove = (/** @type {PointerEvent} */ event) => {
    if (!down) return;
    strokes[strokes.length - 1].push(point(event));
    redraw();
  };
  paper.onpointerup = paper.onpointercancel = () => {
    if (down) guard(look)();
    down = false;
  };
  const guard = (/** @type {() => Promise<void>} */ work) => () => work().catch(problem);
  element("clear").onclick = guard(wipe);
  for (const digit of DIGITS) {
    const button = element("labels").appendChild(document.createElement("button"));
    button.textContent = String(digit);
    button.onclick = guard(() => keep(digit));
    const row = element("scores").appendChild(document.createElement("li"));
    row.append(String(digit), document.createElement("i"));
  }
  document.onkeydown = ({ key, target }) => {
    if (/^\d$/.test(key)) guard(() => keep(Number(key)))();
    else if (key === "Escape" || (key === "Backspace" && target === document.body)) guard(wipe)();
  };
  element("train-own").onclick = guard(() => train(batchesOfOwn(), STEPS_OF_OWN, `${drawings.length} drawings`));
  element("train-packaged").onclick = guard(() => {
    const total = EPOCHS_OF_PACKAGED * Math.ceil(packaged.train.labels.length / BATCH);
    return train(batchesOfPackaged(), total, `${packaged.train.labels.length} digits of others`);
  });
  element("stop").onclick = () => (stopped = true);
  element("reset").onclick = guard(async () => {
    await host.loadState(untrained);
    [losses, fresh] = [[], []];
    showTraining(0, 1);
    showFresh();
    element("news").textContent = "It knows nothing again.";
    await check();
    await look();
  });
  element("download").onclick = guard(async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([/** @type {BlobPart} */ (await host.trainedModel())]));
    link.download = "trained.onnx";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  });
}

// Start

async function start() {
  const asked = new URLSearchParams(location.search);
  const wanted = asked.get("on") === "webgpu" ? "webgpu" : "wasm";
  ort = await import(`./ort/ort.${wanted}.min.mjs`);
  const threads = globalThis.crossOriginIsolated ? Math.min(THREADS, navigator.hardwareConcurrency) : 1;
  const folder = new URL("./device/", import.meta.url);
  host = await Host.load(folder, { ort, threads, provider: wanted === "webgpu" ? wanted : "cpu", say: (line) => console.info(line) });
  untrained = await host.saveState();
  const answer = await fetch(new URL("./digits.npz", import.meta.url));
  if (!answer.ok) throw new HostError(`cannot read digits.npz: ${answer.status} ${answer.statusText}`);
  const arrays = await readNpz(new Uint8Array(await answer.arrayBuffer()), "digits.npz");
  const part = (/** @type {string} */ name) => ({
    images: Float32Array.from(arrays.get(`${name}_images`)?.data, (value) => Number(value) / 16),
    labels: [...(arrays.get(`${name}_labels`)?.data ?? [])].map(Number),
  });
  packaged = { train: part("train"), test: part("test") };
  element("packaged").textContent = packaged.train.labels.length.toLocaleString("en");
  element("held-out-count").textContent = packaged.test.labels.length;
  element("runs").textContent =
    (host.provider === "webgpu" ? "Runs on WebGPU. " : `Runs on the processor, with ${count(threads, "thread")}. `) +
    (globalThis.crossOriginIsolated
      ? ""
      : "This page was served without the headers COOP and COEP, so it may not have more.");
  listen();
  await check();
  await look();
  state("ready");
}

/** @param {number} number @param {string} what */
const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

await start().catch((error) => {
  state("failed");
  element("runs").textContent = "";
  problem(error);
});

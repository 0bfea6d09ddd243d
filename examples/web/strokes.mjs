/**
 * Drawings as strokes of a pen, and the 8×8 grey pixels that the network sees of them.
 *
 * The pixels are what the packaged digits are: the drawing, as large as fits, on 32×32 pixels; of each block of 4×4 the
 * share that is ink.
 *
 * @typedef {[x: number, y: number][]} Stroke Where the pen went, in any unit.
 */

export const SIDE = 8;
const WIDE = 32;
const MARGIN = 3; // half of the pen, and the edge that it softens

const canvas = new OffscreenCanvas(WIDE, WIDE);
const pen = /** @type {OffscreenCanvasRenderingContext2D} */ (canvas.getContext("2d", { willReadFrequently: true }));

/**
 * What a network sees of a drawing: 64 numbers from 0 to 1.
 *
 * @param {Stroke[]} strokes @param {{size?: number, width?: number, shift?: [number, number]}} [how] `size`: of the
 *   whole square; `width` of the pen and `shift` in 32nds of it.
 */
export function pixels(strokes, { size = 1, width = 3.4, shift = [0, 0] } = {}) {
  const points = strokes.flat();
  const [low, high] = [Math.min, Math.max].map((most) => [0, 1].map((k) => most(...points.map((point) => point[k]))));
  const scale = ((WIDE - 2 * MARGIN) * size) / Math.max(high[0] - low[0], high[1] - low[1], 1e-6);
  const at = (/** @type {[number, number]} */ point, /** @type {number} */ k) =>
    WIDE / 2 + shift[k] + (point[k] - (low[k] + high[k]) / 2) * scale;
  pen.clearRect(0, 0, WIDE, WIDE);
  Object.assign(pen, { lineWidth: width, lineCap: "round", lineJoin: "round", strokeStyle: "#fff" });
  for (const stroke of strokes) {
    pen.beginPath();
    for (const point of [stroke[0], ...stroke]) pen.lineTo(at(point, 0), at(point, 1)); // a dot is a line to itself
    pen.stroke();
  }
  const { data } = pen.getImageData(0, 0, WIDE, WIDE);
  const out = new Float32Array(SIDE * SIDE);
  const block = WIDE / SIDE;
  for (let y = 0; y < WIDE; y++)
    for (let x = 0; x < WIDE; x++)
      out[Math.floor(y / block) * SIDE + Math.floor(x / block)] += data[4 * (y * WIDE + x) + 3] / 255 / block ** 2;
  return out;
}

/**
 * The same digit as the same hand could have drawn it: turned, slanted, stretched, moved a little.
 *
 * @param {Stroke[]} strokes @param {() => number} random from 0 to 1 @returns {Float32Array} as of `pixels`
 */
export function varied(strokes, random = Math.random) {
  const about = (/** @type {number} */ most) => (2 * random() - 1) * most;
  const [turn, slant, stretch] = [about(0.22), about(0.25), Math.exp(about(0.22))];
  const [c, s] = [Math.cos(turn), Math.sin(turn)];
  const moved = strokes.map((stroke) =>
    stroke.map(([x, y]) => {
      const [u, v] = [(x + slant * y) * stretch, y];
      return /** @type {[number, number]} */ ([c * u - s * v, s * u + c * v]);
    }),
  );
  return pixels(moved, { size: 1 - 0.15 * random(), width: 3.4 + about(0.9), shift: [about(2), about(2)] });
}

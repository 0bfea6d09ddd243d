/**
 * Train with exported step models, in Node or in a browser: this file and an ONNX Runtime for JavaScript, nothing else.
 *
 *     node host.mjs train.npz --epochs 2 --batch-size 32 [--parts 4] [--threads 1] [--save trained.npz]
 *                   [--save-model trained.onnx] [--runtime onnxruntime-web]
 *
 *     import * as ort from "onnxruntime-web";
 *     import { Host, scalar } from "./device/host.mjs";
 *     const host = await Host.load(new URL("./device/", import.meta.url), { ort });
 *     const { loss } = await host.step({ x: new ort.Tensor("float32", pixels, [32, 64]), labels });
 *     console.log(scalar(loss));
 *
 * With `provider: "webgpu"` (of "onnxruntime-web/webgpu") the state stays on the device from step to step.
 *
 * It reads contract.json, state.npz and the models beside it. The arrays of the .npz file have the names of the inputs.
 * int64 is a BigInt64Array, float16 a Uint16Array of its bits where there is no Float16Array, bool a Uint8Array.
 *
 * @typedef {{type: string, dims: readonly number[], data: any}} Values Values of a tensor in C order; a tensor is one.
 * @typedef {Record<string, Values>} Batch
 * @typedef {{file: string, batch: string[], state: Record<string, {input: string, output: string}>, reads: string[],
 *   rates: string[], results: string[], off_webgpu?: Record<string, number>}} About What the inputs and outputs of one
 *   model are, and how often which operators have no kernel on WebGPU.
 * @typedef {{version: number, loss: string, state: Record<string, {dtype: string, shape: number[]}>,
 *   rates: Record<string, number>, models: Record<string, About>, classes?: string[],
 *   plan?: {batch_size?: number, parts?: number, small?: boolean}, preprocessing?: {
 *   images?: {mean: number[], std: number[], size: number[] | null, inputs: string[]},
 *   inputs?: Record<string, {columns: string[]}>, max_length?: number}}} Contract
 */

const VERSION = 1;
const GPU_HINT = "on WebGPU, steps exported with --target web run, by onnxruntime-web/webgpu; the default build fails";

/** What a user can mend: said in one line. */
export class HostError extends Error {}

/** The state, and the models that read and replace it. Calls run one after another, in the order they were made. */
export class Host {
  /** @type {Contract} */ contract;
  /** @type {Map<string, any>} Tensors by name. */ state = new Map();
  /** @type {Record<string, number>} Fed where a call names no other. */ rates;
  /** @type {any} */ #ort;
  /** @type {URL} */ #base;
  /** @type {number} */ #threads;
  /** @type {"cpu" | "webgpu"} Where it runs; "cpu" is WASM in a page. */ provider;
  /** @type {(line: string) => void} */ #say;
  /** @type {Map<string, any>} */ #sessions = new Map();
  /** @type {Promise<any>} */ #last = Promise.resolve();

  /**
   * The host of an exported step.
   *
   * @param {string | URL} [folder] a path (Node) or an address that ends in "/"; default: where this file lies.
   * @param {{ort?: any, threads?: number, provider?: "cpu" | "webgpu", say?: (line: string) => void}} [options] `ort`:
   *   onnxruntime-node or onnxruntime-web as imported; by default it is imported by that name. `threads`: 0 leaves the
   *   number to the runtime; in a page, several need the headers COOP and COEP. `provider`: "webgpu" takes the processor
   *   where there is no adapter. `say`: is told what runs on the processor after all.
   * @throws {HostError} of a contract of another version, or a state that does not match it.
   */
  static async load(
    folder = new URL(".", import.meta.url),
    { ort, threads = 0, provider = "cpu", say = (line) => console.warn(line) } = {},
  ) {
    const base = await address(folder);
    const contract = parsed(await read(new URL("contract.json", base)));
    if (provider !== "cpu" && provider !== "webgpu")
      throw new HostError(`provider is "cpu" or "webgpu", not ${JSON.stringify(provider)}`);
    const gpu = provider === "webgpu";
    ort ??= await runtime(IN_NODE ? "onnxruntime-node" : gpu ? "onnxruntime-web/webgpu" : "onnxruntime-web");
    if (gpu && !(await globalThis.navigator?.gpu?.requestAdapter())) {
      say("there is no WebGPU adapter here: all runs on the processor");
      provider = "cpu";
    }
    if (threads > 1 && globalThis.crossOriginIsolated === false)
      throw new HostError(
        "this page may not have threads: serve it with the headers Cross-Origin-Opener-Policy: same-origin and " +
          "Cross-Origin-Embedder-Policy: require-corp, or ask for one thread",
      );
    if (threads > 0) ort.env.wasm.numThreads = threads;
    const host = new Host(ort, base, contract, threads, provider, say);
    await host.loadState(await read(new URL("state.npz", base)));
    return host;
  }

  /**
   * Use `Host.load`.
   *
   * @param {any} ort @param {URL} base @param {Contract} contract @param {number} threads
   * @param {"cpu" | "webgpu"} provider @param {(line: string) => void} say
   */
  constructor(ort, base, contract, threads, provider, say) {
    [this.#ort, this.#base, this.contract, this.#threads] = [ort, base, contract, threads];
    [this.provider, this.#say] = [provider, say];
    this.rates = { ...contract.rates };
  }

  /**
   * Run one model of the contract on the state: what it renews is kept, its results are returned.
   *
   * @param {string} model its name in the contract @param {Batch} [batch] @param {Record<string, number>} [rates]
   * @returns {Promise<Record<string, any>>} tensors by name
   * @throws {HostError} when the runtime lacks an operator, or an input is missing or of another type.
   */
  run(model, batch = {}, rates = {}) {
    return this.#inTurn(() => this.#run(model, batch, rates));
  }

  /**
   * A batch as the model was trained: columns of a table joined by name, bytes of pictures scaled.
   *
   * @param {Batch} batch @returns {Batch} @throws {HostError} when a column is missing.
   */
  prepared(batch) {
    /** @type {Batch} */
    const found = { ...batch };
    const { inputs = {}, images } = this.contract.preprocessing ?? {};
    for (const [name, { columns }] of Object.entries(inputs)) {
      const present = columns.filter((column) => Object.hasOwn(batch, column));
      if (Object.hasOwn(batch, name) || !present.length) continue;
      const missing = columns.find((column) => !Object.hasOwn(batch, column));
      if (missing !== undefined)
        throw new HostError(`the data have no column ${missing}, which the model was trained on`);
      const [rows, width] = [batch[columns[0]].dims[0], columns.length];
      const data = new Float32Array(rows * width);
      columns.forEach((column, k) => {
        for (let i = 0; i < rows; i++) data[i * width + k] = Number(batch[column].data[i]);
      });
      found[name] = width > 1 ? { type: "float32", dims: [rows, width], data } : batch[columns[0]];
    }
    for (const name of images?.inputs ?? []) {
      const { type, dims, data } = found[name] ?? {};
      if (!images || type !== "uint8" || dims?.length !== 4) continue;
      const first = dims[1] === 1 || dims[1] === 3;
      const [channels, step] = first ? [dims[1], dims[2] * dims[3]] : [dims[3], 1];
      const of = (/** @type {number[]} */ list, /** @type {number} */ k) => list[list.length > 1 ? k : 0];
      const scaled = Float32Array.from(data, (value, at) => {
        const channel = Math.floor(at / step) % channels;
        return (Math.fround(value / 255) - of(images.mean, channel)) / of(images.std, channel);
      });
      found[name] = { type: "float32", dims, data: scaled };
    }
    return found;
  }

  /** One step, in parts where the contract plans it; its results. @param {Batch} batch */
  step(batch) {
    const { parts = 1 } = this.contract.plan ?? {};
    return parts === 1 ? this.run("train", batch) : this.stepInParts(batch, parts);
  }

  /** The loss and the predictions as they are outside of training. @param {Batch} batch */
  evaluate(batch) {
    return this.run("evaluate", batch);
  }

  /** The outputs of the trained model. @param {Batch} batch */
  infer(batch) {
    return this.run("infer", batch);
  }

  /**
   * One step from the gradients of parts of the batch, added up; the loss of the batch.
   *
   * @param {Batch} batch @param {number} parts @returns {Promise<Record<string, any>>}
   */
  stepInParts(batch, parts) {
    return this.#inTurn(async () => {
      const rows = rowsOf(batch);
      const count = Math.min(parts, rows);
      let [sum, total, type] = [0, 0, "float32"];
      for (let k = 0, low = 0; k < count; k++) {
        const high = low + Math.floor(rows / count) + Number(k < rows % count);
        const results = await this.#run("gradient", rowsFrom(batch, low, high), { gradient_keep: Number(k > 0) });
        const { batch_weight, [this.contract.loss]: loss } = results; // a sum has no batch_weight
        const weight = batch_weight ? scalar(batch_weight) : 1;
        if (weight) sum += scalar(loss) * weight; // a mean over nothing is no number
        total = batch_weight ? total + weight : 1;
        if (loss.type === "float64") type = loss.type;
        low = high;
      }
      await this.#run("update", {}, {});
      return { [this.contract.loss]: new this.#ort.Tensor(type, [sum / total], []) };
    });
  }

  /** The state, as the bytes of an .npz file. */
  saveState() {
    return this.#inTurn(async () => writeNpz(await onProcessor(this.state)));
  }

  /**
   * Take the state from the bytes of an .npz file.
   *
   * @param {Uint8Array | Promise<Uint8Array>} bytes @throws {HostError} when it is of another model; the state is as it was then.
   */
  async loadState(bytes) {
    const arrays = await readNpz(await bytes, "the state");
    const expected = Object.entries(this.contract.state);
    for (const [name, { dtype, shape }] of expected) {
      const found = arrays.get(name);
      const said = found && `${found.type}[${found.dims}]`;
      if (said !== `${dtype}[${shape}]`)
        throw new HostError(
          `the state is of another model: contract.json has ${dtype}[${shape}] ${name}, the state ` +
            (found ? `has ${said}` : "has no such tensor"),
        );
    }
    const other = [...arrays.keys()].find((name) => !Object.hasOwn(this.contract.state, name));
    if (other !== undefined)
      throw new HostError(`the state is of another model: it has ${other}, which contract.json does not name`);
    await this.#inTurn(async () => this.#replace(expected.map(([n]) => [n, this.#tensor(arrays.get(n))])));
  }

  /** The trained model, as the bytes of an .onnx file: infer.onnx, which holds its parameters. */
  async trainedModel() {
    const { file, reads } = this.#about("infer");
    const bytes = await read(new URL(file, this.#base));
    if (mentions(bytes, `${file}.data`))
      throw new HostError(`${file} keeps weights in ${file}.data; export the step from a model in one file`);
    const weights = () => onProcessor(new Map(reads.map((name) => [name, this.state.get(name)])));
    return withWeights(bytes, await this.#inTurn(weights));
  }

  /** Give back what the runtime holds. */
  release() {
    return this.#inTurn(async () => {
      await this.#close();
      for (const tensor of new Set(this.state.values())) tensor.dispose();
      this.state.clear();
    });
  }

  /** @template T @param {() => Promise<T>} work @returns {Promise<T>} */
  #inTurn(work) {
    const found = this.#last.then(work);
    this.#last = found.catch(() => {});
    return found;
  }

  /** @param {string} model */
  #about(model) {
    if (!Object.hasOwn(this.contract.models, model))
      throw new HostError(`this export has no ${model}.onnx, but ${Object.keys(this.contract.models).join(", ")}`);
    return this.contract.models[model];
  }

  /** @param {Values | undefined} values */
  #tensor(values) {
    return values instanceof this.#ort.Tensor ? values : new this.#ort.Tensor(values?.type, values?.data, values?.dims);
  }

  /** Take next values for the values, and let those go. @param {[string, any][]} entries */
  #replace(entries) {
    const old = new Set(this.state.values());
    this.state = new Map([...this.state, ...entries]);
    const kept = new Set(this.state.values());
    for (const tensor of old) if (!kept.has(tensor)) tensor.dispose();
  }

  /** @param {string} model @param {About} about */
  async #session(model, about) {
    const found = this.#sessions.get(model) ?? (await this.#open(about));
    this.#sessions.set(model, found);
    return found;
  }

  /** @param {About} about @returns {Promise<any>} */
  async #open(about) {
    const { file } = about;
    const place = new URL(file, this.#base);
    /** @type {Record<string, any>} */
    const options = { executionProviders: ["cpu"], intraOpNumThreads: this.#threads };
    if (this.provider === "webgpu")
      Object.assign(options, { executionProviders: ["webgpu"], preferredOutputLocation: this.#places(about) });
    const versions = this.#ort.env.versions;
    /** @type {any} */
    let source = place;
    if (versions.node) source = (await import("node:url")).fileURLToPath(place);
    else {
      source = await read(place);
      const more = `${file}.data`;
      if (mentions(source, more)) options.externalData = [{ path: more, data: await read(new URL(more, place)) }];
    }
    try {
      const session = await this.#ort.InferenceSession.create(source, options);
      const off = Object.entries(about.off_webgpu ?? {}).map(([name, count]) => `${name} ×${count}`);
      if (this.provider === "webgpu" && off.length)
        this.#say(`${file}: not on WebGPU, so on the processor: ${off.join(", ")}`);
      return session;
    } catch (error) {
      const cause = firstLine(error).replace(/^.*?(ERROR_MESSAGE: |failed: ?)/, "");
      if (this.provider === "webgpu") {
        this.#say(`${file} does not load on WebGPU, so all runs on the processor: ${cause}`);
        await this.#toProcessor();
        return this.#open(about);
      }
      const said = cause.replace(/^.*(?=Current official support)/, "");
      const called = versions.node ? `onnxruntime-node ${versions.node}` : `onnxruntime-web ${versions.web}`;
      if (/not a registered function|could not find an implementation|no op registered|till opset/i.test(said))
        throw new HostError(
          `${called} lacks an operator of ${file}: ${said}\n  hint: try another or a newer runtime` +
            (versions.web ? ", or export the step with --target web" : ""),
        );
      throw new HostError(`${called} cannot load ${file}: ${said}`);
    }
  }

  /** What of the outputs stays on the device: next values that later steps read there. @param {About} about */
  #places({ state, results }) {
    const kept = ["float32", "float16"];
    const on = (/** @type {string} */ name) => kept.includes(this.contract.state[name].dtype);
    const ends = Object.entries(state).map(([name, { output }]) => [output, on(name) ? "gpu-buffer" : "cpu"]);
    return Object.fromEntries([...ends, ...results.map((name) => [name, "cpu"])]);
  }

  async #close() {
    const sessions = [...this.#sessions.values()];
    this.#sessions.clear();
    for (const session of sessions) await session.release();
  }

  /** Leave the device: the state comes down, and sessions open anew. */
  async #toProcessor() {
    this.provider = "cpu";
    const down = await onProcessor(this.state);
    this.#replace([...down].map(([name, values]) => [name, this.#tensor(values)]));
    await this.#close();
  }

  /** @param {string} model @param {Batch} batch @param {Record<string, number>} rates */
  async #run(model, batch, rates) {
    const about = this.#about(model);
    const session = await this.#session(model, about);
    /** @type {Map<string, string>} */
    const types = new Map(session.inputMetadata?.map((/** @type {any} */ input) => [input.name, input.type]));
    /** @type {Record<string, any>} */
    const feeds = {};
    for (const name of about.batch) {
      const given = Object.hasOwn(batch, name) ? batch[name] : undefined;
      const wanted = types.get(name);
      if (!given) throw new HostError(`${about.file} takes ${name}, which the batch does not have`);
      if (wanted && wanted !== given.type)
        throw new HostError(`${about.file} takes ${wanted} for ${name}, and the batch has ${given.type}`);
      feeds[name] = this.#tensor(given);
    }
    for (const [name, ends] of Object.entries(about.state)) feeds[ends.input] = this.state.get(name);
    for (const name of about.reads) feeds[name] = this.state.get(name);
    for (const name of about.rates) {
      const type = types.get(name) === "float64" ? "float64" : "float32";
      feeds[name] = new this.#ort.Tensor(type, [rates[name] ?? this.rates[name] ?? 0], []);
    }
    const ends = Object.entries(about.state);
    const outputs = new Set(ends.map(([, { output }]) => output));
    let found;
    try {
      found = await session.run(feeds, [...new Set([...outputs, ...about.results])]);
    } catch (error) {
      const hint = this.provider === "webgpu" ? `\n  hint: ${GPU_HINT}` : "";
      throw new HostError(`${about.file} does not run: ${firstLine(error)}${hint}`);
    }
    /** @type {Record<string, any>} */
    const results = {};
    for (const name of about.results) {
      const { type, data, dims } = found[name];
      results[name] = outputs.has(name) ? new this.#ort.Tensor(type, data.slice(), dims) : found[name];
    }
    this.#replace(ends.map(([name, { output }]) => [name, found[output]]));
    return results;
  }
}

/** Values of tensors, of which some may be on a device. @param {Map<string, any>} tensors */
async function onProcessor(tensors) {
  /** @type {Map<string, Values>} */
  const found = new Map();
  for (const [name, tensor] of tensors)
    found.set(name, { type: tensor.type, dims: tensor.dims, data: await tensor.getData() });
  return found;
}

/** The value of a tensor of one element, as a number. @param {Values} tensor */
export function scalar({ type, data }) {
  if (type !== "float16" || !(data instanceof Uint16Array)) return Number(data[0]);
  const [exponent, fraction] = [(data[0] >> 10) & 31, data[0] & 1023];
  const size = exponent === 0 ? fraction * 2 ** -24 : (1 + fraction / 1024) * 2 ** (exponent - 15);
  return (data[0] >> 15 ? -1 : 1) * (exponent < 31 ? size : fraction ? NaN : Infinity);
}

// Batches

/** @param {Batch} batch */
function rowsOf(batch) {
  const rows = new Set(Object.values(batch).map((array) => array.dims[0]));
  const [first] = rows;
  if (rows.size !== 1 || !first) throw new HostError("the arrays of the data must have rows, all as many");
  return first;
}

/** @param {Batch} batch @param {number} low @param {number} high @returns {Batch} */
function rowsFrom(batch, low, high) {
  const parts = Object.entries(batch).map(([name, { type, dims, data }]) => {
    const size = data.length / dims[0];
    const part = data.subarray(low * size, high * size);
    return [name, { type, dims: [part.length ? Math.min(high, dims[0]) - low : 0, ...dims.slice(1)], data: part }];
  });
  return Object.fromEntries(parts);
}

// Files

const IN_NODE = typeof process !== "undefined" && Boolean(process.versions?.node);

/** @param {unknown} error */
export const firstLine = (error) => String(/** @type {any} */ (error)?.message ?? error).split("\n")[0];

/** @param {string | URL} folder */
export async function address(folder) {
  const page = globalThis.document?.baseURI ?? globalThis.location?.href; // a worker has no document
  if (folder instanceof URL || !IN_NODE) return new URL(String(folder).replace(/\/*$/, "/"), page);
  const [{ pathToFileURL }, { resolve }] = [await import("node:url"), await import("node:path")];
  return /^(https?|file):\/\//.test(folder) ? new URL(folder) : new URL(`${pathToFileURL(resolve(folder)).href}/`);
}

/** @param {Uint8Array} bytes @returns {Contract} */
function parsed(bytes) {
  /** @type {any} */
  let found;
  try {
    found = JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new HostError(`contract.json is damaged: ${firstLine(error)}`);
  }
  if (!Number.isInteger(found?.version)) throw new HostError("contract.json is no contract: it has no version");
  if (found.version !== VERSION)
    throw new HostError(
      `contract.json has version ${found.version}; this host reads version ${VERSION}\n` +
        "  hint: take the host.mjs that export-step wrote beside it",
    );
  const lacks = ["loss", "state", "rates", "models"].find((part) => !(part in found));
  if (lacks) throw new HostError(`contract.json is damaged: it has no ${lacks}`);
  return found;
}

/** @param {URL} place @returns {Promise<Uint8Array>} */
export async function read(place) {
  try {
    if (place.protocol === "file:") return await (await import("node:fs/promises")).readFile(place);
    const answer = await fetch(place);
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    return new Uint8Array(await answer.arrayBuffer());
  } catch (error) {
    throw new HostError(`cannot read ${place.href}: ${firstLine(error)}`);
  }
}

/** The package `name`, from where this file lies or where the program was started. @param {string} name */
export async function runtime(name) {
  /** @type {any} */
  let found;
  try {
    found = await import(name);
  } catch (error) {
    try {
      const [{ createRequire }, { pathToFileURL }] = [await import("node:module"), await import("node:url")];
      found = await import(pathToFileURL(createRequire(import.meta.url).resolve(name)).href); // NODE_PATH counts here
    } catch {
      throw new HostError(`cannot import ${name} (npm install ${name}): ${firstLine(error)}`);
    }
  }
  return found.InferenceSession ? found : found.default;
}

/** @param {Uint8Array} bytes @param {string} text */
export function mentions(bytes, text) {
  for (let at = 0; at < bytes.length; at += 2 ** 24) // strings have a largest length
    if (new TextDecoder("latin1").decode(bytes.subarray(at, at + 2 ** 24 + text.length)).includes(text)) return true;
  return false;
}

/** @param {ArrayBufferView} data @returns {Uint8Array<any>} */
const bytesOf = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);

/** @param {Uint8Array[]} parts */
export function joined(parts) {
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

/**
 * By type of tensor: what numpy calls it in files, its number in ONNX, the array that holds it.
 * @type {Map<string, [string, number, any]>}
 */
export const TYPES = new Map([
  ["float32", ["<f4", 1, Float32Array]],
  ["uint8", ["|u1", 2, Uint8Array]],
  ["int8", ["|i1", 3, Int8Array]],
  ["uint16", ["<u2", 4, Uint16Array]],
  ["int16", ["<i2", 5, Int16Array]],
  ["int32", ["<i4", 6, Int32Array]],
  ["int64", ["<i8", 7, BigInt64Array]],
  ["bool", ["|b1", 9, Uint8Array]],
  ["float16", ["<f2", 10, Uint16Array]],
  ["float64", ["<f8", 11, Float64Array]],
  ["uint32", ["<u4", 12, Uint32Array]],
  ["uint64", ["<u8", 13, BigUint64Array]],
]);

// .npz: a zip of .npy files

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

/** @param {Uint8Array} bytes */
function crc32(bytes) {
  let crc = ~0;
  for (let i = 0; i < bytes.length; i++) crc = CRC[(crc ^ bytes[i]) & 255] ^ (crc >>> 8);
  return ~crc >>> 0;
}

/**
 * The arrays of an .npz file, by name.
 *
 * @param {Uint8Array} bytes @param {string} [called] @returns {Promise<Map<string, Values>>}
 */
export async function readNpz(bytes, called = "the file") {
  try {
    bytes = bytesOf(bytes); // a Buffer of Node has another `slice`
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    let end = bytes.length - 22;
    while (view.getUint32(end, true) !== 0x06054b50) end--;
    const arrays = new Map();
    let at = view.getUint32(end + 16, true);
    for (let left = view.getUint16(end + 10, true); left > 0; left--) {
      const [method, crc] = [view.getUint16(at + 10, true), view.getUint32(at + 16, true)];
      const [size, local] = [view.getUint32(at + 20, true), view.getUint32(at + 42, true)];
      const [long, ...more] = [28, 30, 32].map((k) => view.getUint16(at + k, true));
      const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + long)).replace(/\.npy$/, "");
      const from = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
      let member = bytes.subarray(from, from + size);
      if (method === 8) {
        const packed = new Blob([/** @type {BlobPart} */ (member)]).stream();
        const stream = packed.pipeThrough(new DecompressionStream("deflate-raw"));
        member = new Uint8Array(await new Response(stream).arrayBuffer());
      }
      if (crc32(member) !== crc) throw new Error(`${name} has another checksum`);
      arrays.set(name, readNpy(member, name));
      at += 46 + long + more[0] + more[1];
    }
    return arrays;
  } catch (error) {
    if (error instanceof HostError) throw error;
    throw new HostError(`${called} is no .npz file of less than 4 GB, or is damaged: ${firstLine(error)}`);
  }
}

/** @param {Uint8Array} bytes @param {string} name @returns {Values} */
function readNpy(bytes, name) {
  const wide = bytes[6] > 1;
  const long = new DataView(bytes.buffer, bytes.byteOffset).getUint32(8, true) & (wide ? ~0 : 0xffff);
  const start = (wide ? 12 : 10) + long;
  const header = new TextDecoder("latin1").decode(bytes.subarray(0, start));
  const descr = /'descr':\s*'([^']*)'/.exec(header)?.[1];
  const [type, [, , Kind]] = [...TYPES].find(([, [code]]) => code === descr) ?? ["", []];
  if (!Kind) throw new HostError(`the array ${name} has the numpy type ${descr}, which this host does not read`);
  const dims = [.../'shape':\s*\(([^)]*)\)/.exec(header)?.[1].matchAll(/\d+/g) ?? []].map(Number);
  const data = new Kind(bytes.slice(start).buffer);
  if (data.length !== dims.reduce((size, n) => size * n, 1)) throw new Error(`${name} has another size`);
  return { type, dims, data: /'fortran_order':\s*True/.test(header) ? inCOrder(data, dims) : data };
}

/** @param {any} data in Fortran's order @param {number[]} dims */
function inCOrder(data, dims) {
  const out = new data.constructor(data.length);
  const index = dims.map(() => 0);
  for (let to = 0; to < out.length; to++) {
    out[to] = data[index.reduceRight((from, i, axis) => from * dims[axis] + i, 0)];
    for (let axis = dims.length - 1; axis >= 0 && ++index[axis] === dims[axis]; axis--) index[axis] = 0;
  }
  return out;
}

/** The bytes of an .npz file of `arrays`, as numpy.savez would write it. @param {Map<string, Values>} arrays */
export function writeNpz(arrays) {
  const [members, directory] = [/** @type {Uint8Array[]} */ ([]), /** @type {Uint8Array[]} */ ([])];
  let offset = 0;
  for (const [key, { type, dims, data }] of arrays) {
    const [code] = TYPES.get(type) ?? [];
    const shape = dims.length === 1 ? `${dims[0]},` : dims.join(", ");
    const said = `{'descr': '${code}', 'fortran_order': False, 'shape': (${shape}), }`;
    const long = Math.ceil((said.length + 11) / 64) * 64 - 10;
    const head = new TextEncoder().encode(`......${"\x01\0"}..${said.padEnd(long - 1)}\n`);
    head.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59]);
    new DataView(head.buffer).setUint16(8, long, true);
    const member = joined([head, bytesOf(data)]);
    const name = new TextEncoder().encode(`${key}.npy`);
    const about = new DataView(new ArrayBuffer(26)); // what both of its headers say: UTF-8, stored, 1980-01-01
    [20, 0x800, 0, 0, 33].forEach((value, k) => about.setUint16(2 * k, value, true));
    [crc32(member), member.length, member.length].forEach((value, k) => about.setUint32(10 + 4 * k, value, true));
    about.setUint16(22, name.length, true);
    const both = new Uint8Array(about.buffer);
    const tail = new DataView(new ArrayBuffer(14));
    tail.setUint32(10, offset, true);
    members.push(Uint8Array.of(0x50, 0x4b, 3, 4), both, name, member);
    directory.push(Uint8Array.of(0x50, 0x4b, 1, 2, 20, 0), both, new Uint8Array(tail.buffer), name);
    offset += 30 + name.length + member.length;
  }
  const list = joined(directory);
  if (offset + list.length > 2 ** 32 - 1 || arrays.size > 65534)
    throw new HostError("the state is larger than a zip file can be, 4 GiB");
  const end = new DataView(new ArrayBuffer(22));
  end.setUint32(0, 0x06054b50, true);
  for (const k of [8, 10]) end.setUint16(k, arrays.size, true);
  end.setUint32(12, list.length, true);
  end.setUint32(16, offset, true);
  return joined([...members, list, new Uint8Array(end.buffer)]);
}

// .onnx: fields of protobuf, each a number and a payload

/** The fields of a message. @param {Uint8Array} bytes */
export function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let [value, scale] = [0, 1];
    for (; bytes[at] > 127; scale *= 128) value += (bytes[at++] & 127) * scale;
    return value + bytes[at++] * scale;
  };
  while (at < bytes.length) {
    const start = at;
    const tag = varint();
    const kind = tag % 8;
    let from = at;
    if (kind === 0) varint();
    else {
      const long = kind === 2 ? varint() : kind === 1 ? 8 : 4;
      from = at;
      at += long;
    }
    yield { number: Math.floor(tag / 8), whole: bytes.subarray(start, at), payload: bytes.subarray(from, at) };
  }
}

/** @param {number} value */
function varint(value) {
  const out = [];
  for (; value > 127; value = Math.floor(value / 128)) out.push((value % 128) + 128);
  return Uint8Array.from([...out, value]);
}

/** @param {number} number @param {Uint8Array} payload */
export const field = (number, payload) => joined([varint(number * 8 + 2), varint(payload.length), payload]);

/**
 * A model whose inputs `weights` became initializers.
 *
 * @param {Uint8Array} model @param {Map<string, Values>} weights
 */
function withWeights(model, weights) {
  const named = (/** @type {Uint8Array} */ value) =>
    new TextDecoder().decode([...fields(value)].find(({ number }) => number === 1)?.payload);
  const tensors = [...weights].map(([name, { type, dims, data }]) => {
    const kind = varint(TYPES.get(type)?.[1] ?? 0);
    const shape = dims.flatMap((size) => [varint(8), varint(size)]);
    const about = [...shape, varint(16), kind, field(8, new TextEncoder().encode(name))];
    return field(5, joined([...about, field(9, bytesOf(data))]));
  });
  const parts = [...fields(model)].map(({ number, whole, payload }) => {
    if (number !== 7) return whole;
    const kept = [...fields(payload)].filter((part) => part.number !== 11 || !weights.has(named(part.payload)));
    return field(7, joined([...kept.map((part) => part.whole), ...tensors]));
  });
  const made = joined(parts);
  if (made.length > 2 ** 31 - 1) throw new HostError("the trained model is larger than an .onnx file can be, 2 GiB");
  return made;
}

// The command

async function main() {
  const { parseArgs } = await import("node:util");
  const { writeFile, rename } = await import("node:fs/promises");
  const text = { type: /** @type {const} */ ("string") };
  const number = (/** @type {string} */ least) => ({ ...text, default: least });
  let asked;
  try {
    asked = parseArgs({
      allowPositionals: true,
      options: {
        epochs: number("1"),
        "batch-size": text,
        parts: text,
        threads: number("0"),
        save: text,
        "save-model": text,
        runtime: { ...text, default: "onnxruntime-node" },
      },
    });
  } catch (error) {
    throw new HostError(firstLine(error));
  }
  const { values: options, positionals } = asked;
  if (positionals.length !== 1) throw new HostError("say which .npz file: node host.mjs train.npz");
  const counts = /** @type {const} */ (["epochs", "batch-size", "parts", "threads"]);
  const [epochs, givenSize, givenParts, threads] = counts.map((name) => {
    const value = Number(options[name] ?? 1);
    if (!Number.isInteger(value) || value < Number(name !== "threads"))
      throw new HostError(`--${name} takes a whole number, not ${options[name]}`);
    return value;
  });
  const here = new URL(".", import.meta.url);
  const data = await readNpz(await read(new URL((await address(positionals[0])).href.slice(0, -1))), positionals[0]);
  const host = await Host.load(here, { ort: await runtime(options.runtime), threads });
  const batches = host.prepared(Object.fromEntries(data));
  const rows = rowsOf(batches);
  const { loss, plan = {} } = host.contract;
  const size = options["batch-size"] === undefined ? (plan.batch_size ?? 32) : givenSize;
  const parts = options.parts === undefined ? (plan.parts ?? 1) : givenParts;
  for (let epoch = 1; epoch <= epochs; epoch++)
    for (let low = 0; low < rows; low += size) {
      const batch = rowsFrom(batches, low, low + size);
      const found = parts === 1 ? await host.run("train", batch) : await host.stepInParts(batch, parts);
      console.log(`epoch ${epoch}  loss ${scalar(found[loss])}`);
    }
  const write = async (/** @type {string} */ path, /** @type {Uint8Array} */ bytes) => {
    try {
      await writeFile(`${path}.partial`, bytes);
      await rename(`${path}.partial`, path);
    } catch (error) {
      throw new HostError(`cannot write ${path}: ${firstLine(error)}`);
    }
  };
  if (options.save) await write(options.save, await host.saveState());
  if (options["save-model"]) await write(options["save-model"], await host.trainedModel());
  await host.release();
}

if (IN_NODE && process.argv[1]) {
  const [{ realpath }, { pathToFileURL }] = [await import("node:fs/promises"), await import("node:url")];
  const started = await realpath(process.argv[1]).then((path) => pathToFileURL(path).href, () => "");
  if (started === import.meta.url)
    await main().catch((error) => {
      if (!(error instanceof HostError)) throw error;
      console.error(`host.mjs: ${error.message}`);
      process.exitCode = 2;
    });
}

/**
 * One model and several adapters of it, in Node or in a browser: each run names its adapter, the base is loaded once.
 *
 *     import * as ort from "onnxruntime-web";
 *     import { AdaptedModel } from "./french/adapters.mjs";
 *     const model = await AdaptedModel.load(new URL("./french/", import.meta.url), { ort });
 *     await model.add("french", new URL("./french/", import.meta.url));
 *     const { scores } = await model.run({ x: new ort.Tensor("float32", values, [16, 6]) }, "french");
 *
 * It reads folders that `Trainer.save_adapter` wrote: `model.onnx` of one (`switchable=True`), and of each adapter
 * `adapter.onnx_adapter` with the header of `adapter_model.safetensors`.
 *
 * ONNX Runtime for JavaScript feeds no input that has an initializer. So the defaults of the adapter are taken out of
 * the model before it is loaded, and fed where a run has no other values.
 *
 * @typedef {import("./host.mjs").Values} Values
 * @typedef {{weight: string, part: any, tensors: Record<string, string>, scale: number}} Entry
 * @typedef {{form: string, base: string, entries: Entry[], also: string[]}} AdapterRecord See record.py.
 */

import { address, field, fields, firstLine, HostError, joined, mentions, read, runtime, TYPES } from "./host.mjs";

const [MODEL, ADAPTER, TENSORS] = ["model.onnx", "adapter.onnx_adapter", "adapter_model.safetensors"];
const RECORD = "onnxgrad.adapter";
/** Of each adapter, the tensor that takes up a factor of the change, as in forms.py. */
const SCALED = new Set(["B", "hada_w1_a", "lokr_w1", "lokr_w1_a"]);
const text = (/** @type {Uint8Array | undefined} */ bytes) => new TextDecoder().decode(bytes);

/** A session, and the values of adapters by name. */
export class AdaptedModel {
  /** @type {any} */ #ort;
  /** @type {any} */ #session;
  /** @type {AdapterRecord} */ #record;
  /** @type {Map<string, any>} The values without an adapter. */ #neutral;
  /** @type {Map<string, Map<string, any>>} */ #adapters = new Map();

  /**
   * The model of an adapter's folder.
   *
   * @param {string | URL} folder a path (Node) or an address that ends in "/".
   * @param {{ort?: any, threads?: number}} [options] `ort`: onnxruntime-node or onnxruntime-web as imported; by default
   *   onnxruntime-web is imported by that name. `threads`: 0 leaves the number to the runtime.
   * @throws {HostError} when the folder has no model that takes adapters, or the runtime cannot load it.
   */
  static async load(folder, { ort, threads = 0 } = {}) {
    const place = new URL(MODEL, await address(folder));
    ort ??= await runtime("onnxruntime-web");
    if (threads > 0) ort.env.wasm.numThreads = threads;
    const bytes = await read(place);
    const more = mentions(bytes, `${MODEL}.data`) ? await read(new URL(`${MODEL}.data`, place)) : undefined;
    const record = recordOf(propertiesOf(bytes)[RECORD], place.href, "save the adapter with switchable=True");
    if (record.form === "vera") // its projections are constants of the model, and each adapter has others
      throw new HostError(`${place.href} has an adapter of VeRA, which is not switched here\n  hint: train LoRA`);
    const trained = new Set([...record.entries.flatMap(({ tensors }) => Object.values(tensors)), ...record.also]);
    const { model, taken } = withoutDefaults(bytes, trained, more);
    const lacking = [...trained].find((name) => !taken.has(name));
    if (lacking !== undefined) throw new HostError(`${place.href} takes no adapters: ${lacking} is no input of it`);
    const data = more && { externalData: [{ path: `${MODEL}.data`, data: more }] };
    try {
      const session = await ort.InferenceSession.create(model, { intraOpNumThreads: threads, ...data });
      return new AdaptedModel(ort, session, record, taken);
    } catch (error) {
      throw new HostError(`the runtime cannot load ${place.href}: ${firstLine(error)}`);
    }
  }

  /**
   * Use `AdaptedModel.load`.
   *
   * @param {any} ort @param {any} session @param {AdapterRecord} record @param {Map<string, Values>} neutral
   */
  constructor(ort, session, record, neutral) {
    [this.#ort, this.#session, this.#record] = [ort, session, record];
    this.#neutral = new Map([...neutral].map(([name, values]) => [name, this.#tensor(values)]));
  }

  /** The names of the adapters. */
  get names() {
    return [...this.#adapters.keys()];
  }

  /**
   * Load the adapter of a folder. It may adapt fewer weights than the model takes adapters for.
   *
   * @param {string} name for `run`; an adapter of this name is replaced. @param {string | URL} folder
   * @throws {HostError} when it is of another model, form or rank, or damaged.
   */
  async add(name, folder) {
    const base = await address(folder);
    const [tensors, adapter] = await Promise.all([TENSORS, ADAPTER].map((file) => read(new URL(file, base))));
    const theirs = recordOf(metadataOf(tensors, base.href), base.href, "save it with onnxgrad");
    const mine = this.#record;
    const refuse = (/** @type {string} */ why) =>
      new HostError(`the adapter in ${base.href} is of another model: ${why}`);
    if (theirs.base !== mine.base) throw refuse("it was trained beside other weights");
    if (theirs.form !== mine.form) throw refuse(`it is ${theirs.form}, and the model takes ${mine.form}`);
    const key = (/** @type {Entry} */ { weight, part }) => JSON.stringify([weight, part]);
    const entries = new Map(mine.entries.map((entry) => [key(entry), entry]));
    /** @type {Map<string, [string, number]>} Names in the model and factors. */
    const places = new Map(theirs.also.map((initializer) => [initializer, [initializer, 1]]));
    for (const entry of theirs.entries) {
      const taking = entries.get(key(entry));
      if (!taking) throw refuse(`the model takes no adapter of ${entry.weight}`);
      const factor = entry.scale / taking.scale;
      for (const [letter, tensor] of Object.entries(entry.tensors))
        places.set(tensor, [taking.tensors[letter], SCALED.has(letter) ? factor : 1]);
    }
    const values = new Map(this.#neutral);
    const given = parametersOf(adapter, base.href);
    for (const [tensor, [initializer, factor]] of places) {
      const [found, wanted] = [given.get(tensor), this.#neutral.get(initializer)];
      if (!found) throw new HostError(`the adapter in ${base.href} is damaged: ${ADAPTER} has no ${tensor}`);
      if (!wanted) throw refuse(`${initializer} is no input of it`);
      if (`${found.type}[${found.dims}]` !== `${wanted.type}[${wanted.dims}]`)
        throw refuse(`${tensor} is ${found.type}[${found.dims}], and the model takes ${wanted.type}[${wanted.dims}]`);
      values.set(initializer, this.#tensor(factor === 1 ? found : scaled(found, factor)));
    }
    this.#adapters.set(name, values);
  }

  /** Forget an adapter. @param {string} name */
  remove(name) {
    this.#adapters.delete(name);
  }

  /**
   * The outputs of the model.
   *
   * @param {Record<string, any>} feeds tensors by the names of inputs
   * @param {string | null} [adapter] a name that was given to `add`; default: the model without an adapter
   * @returns {Promise<Record<string, any>>}
   * @throws {HostError} when there is no such adapter, or an input is missing or does not fit.
   */
  async run(feeds, adapter = null) {
    const values = adapter === null ? this.#neutral : this.#adapters.get(adapter);
    if (!values) throw new HostError(`there is no adapter ${adapter}, but ${this.names.join(", ") || "none"}`);
    try {
      return await this.#session.run({ ...feeds, ...Object.fromEntries(values) });
    } catch (error) {
      throw new HostError(`the model does not run: ${firstLine(error)}`);
    }
  }

  /** Give back what the runtime holds. */
  release() {
    return this.#session.release();
  }

  /** @param {Values} values */
  #tensor({ type, data, dims }) {
    return new this.#ort.Tensor(type, data, dims);
  }
}

/** @param {string | undefined} json @param {string} place @param {string} hint @returns {AdapterRecord} */
function recordOf(json, place, hint) {
  const found = json && JSON.parse(json);
  if (found?.version !== 1)
    throw new HostError(`${place} has no description of an adapter that is known here\n  hint: ${hint}`);
  return found;
}

/** The description of the adapter in a safetensors file. @param {Uint8Array} bytes @param {string} place */
function metadataOf(bytes, place) {
  try {
    const long = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
    return JSON.parse(text(bytes.subarray(8, 8 + long))).__metadata__?.[RECORD];
  } catch (error) {
    throw new HostError(`the adapter in ${place} is damaged: ${TENSORS}: ${firstLine(error)}`);
  }
}

/** `values` times `factor`. @param {Values} values @param {number} factor @returns {Values} */
function scaled({ type, dims, data }, factor) {
  if (data instanceof Uint16Array) throw new HostError("adapters of float16 with another alpha are not switched here");
  return { type, dims, data: data.map((/** @type {number} */ value) => value * factor) };
}

/**
 * @param {string} name @param {number} number of the type in ONNX @param {number[]} dims @param {Uint8Array} bytes
 * @returns {Values}
 */
function valuesOf(name, number, dims, bytes) {
  const [type, [, , Kind]] = [...TYPES].find(([, [, n]]) => n === number) ?? ["", []];
  if (!Kind) throw new HostError(`${name} has the type ${number} of ONNX, which this host does not read`);
  return { type, dims, data: new Kind(Uint8Array.from(bytes).buffer) };
}

/** The metadata of a model. @param {Uint8Array} model @returns {Record<string, string>} */
function propertiesOf(model) {
  const props = [...fields(model)].filter(({ number }) => number === 14).map(({ payload }) => entryOf(payload));
  return Object.fromEntries(props);
}

/** A key and a value. @param {Uint8Array} bytes @returns {[string, string]} */
function entryOf(bytes) {
  const parts = new Map([...fields(bytes)].map(({ number, payload }) => [number, payload]));
  return [text(parts.get(1)), text(parts.get(2))];
}

/**
 * A model without the initializers `names` that are inputs too, and their values.
 *
 * @param {Uint8Array} model @param {Set<string>} names @param {Uint8Array | undefined} more its external data
 */
function withoutDefaults(model, names, more) {
  /** @type {Map<string, Values>} */
  const taken = new Map();
  const parts = [...fields(model)].map(({ number, whole, payload }) => {
    if (number !== 7) return whole;
    const held = [...fields(payload)];
    const named = (/** @type {Uint8Array} */ message, /** @type {number} */ at) =>
      text([...fields(message)].find((part) => part.number === at)?.payload);
    const inputs = new Set(held.filter((part) => part.number === 11).map((part) => named(part.payload, 1)));
    const kept = held.filter((part) => {
      const name = part.number === 5 ? named(part.payload, 8) : undefined;
      if (name === undefined || !names.has(name) || !inputs.has(name)) return true;
      taken.set(name, initializerOf(name, part.payload, more));
      return false;
    });
    return field(7, joined(kept.map((part) => part.whole)));
  });
  return { model: joined(parts), taken };
}

/** @param {Uint8Array} bytes */
const decodeVarint = (bytes) => bytes.reduceRight((sum, byte) => sum * 128 + (byte & 127), 0);

/** @param {string} name @param {Uint8Array} bytes of a TensorProto @param {Uint8Array} [more] */
function initializerOf(name, bytes, more) {
  const parts = [...fields(bytes)];
  const of = (/** @type {number} */ at) => parts.filter(({ number }) => number === at).map(({ payload }) => payload);
  let [raw] = of(9);
  const apart = Object.fromEntries(of(13).map(entryOf));
  if (!raw && more && apart.length) {
    const from = Number(apart.offset ?? 0);
    raw = more.subarray(from, from + Number(apart.length));
  }
  return valuesOf(name, decodeVarint(of(2)[0]), of(1).map(decodeVarint), raw ?? new Uint8Array());
}

/**
 * The tensors of an .onnx_adapter file: a flatbuffer of ONNX Runtime's `adapter_schema.fbs`.
 *
 * @param {Uint8Array} bytes @param {string} place
 */
function parametersOf(bytes, place) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const follow = (/** @type {number} */ at) => at + view.getUint32(at, true);
  const slot = (/** @type {number} */ table, /** @type {number} */ k) => {
    const about = table - view.getInt32(table, true);
    const offset = 4 + 2 * k < view.getUint16(about, true) ? view.getUint16(about + 4 + 2 * k, true) : 0;
    return offset && table + offset;
  };
  const list = (/** @type {number} */ table, /** @type {number} */ k) => {
    const at = slot(table, k);
    return at ? { from: follow(at) + 4, size: view.getUint32(follow(at), true) } : { from: 0, size: 0 };
  };
  const part = (/** @type {number} */ table, /** @type {number} */ k) => {
    const { from, size } = list(table, k);
    if (from + size > bytes.length) throw new RangeError("it ends early");
    return bytes.subarray(from, from + size);
  };
  /** @type {Map<string, Values>} */
  const found = new Map();
  try {
    if (text(bytes.subarray(4, 8)) !== "TORT") throw new Error("it is no adapter of ONNX Runtime");
    const all = list(follow(0), 3);
    for (let i = 0; i < all.size; i++) {
      const table = follow(all.from + 4 * i);
      const [dims, kind] = [list(table, 1), slot(table, 2)];
      const shape = Array.from({ length: dims.size }, (_, k) => Number(view.getBigInt64(dims.from + 8 * k, true)));
      const name = text(part(table, 0));
      found.set(name, valuesOf(name, kind && view.getInt32(kind, true), shape, part(table, 3)));
    }
  } catch (error) {
    throw new HostError(`the adapter in ${place} is damaged: ${ADAPTER}: ${firstLine(error)}`);
  }
  return found;
}

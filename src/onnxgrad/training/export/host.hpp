// Train with exported step models in C++: this header, ONNX Runtime's C++ API, and nlohmann/json.
//
//     #include "device/host.hpp"
//     onnxgrad::Host host("device");
//     onnxgrad::Batch batch = {{"x", x}, {"labels", labels}};  // onnxgrad::Array::of<float>({32, 64}, pixels), …
//     double loss = host.step(batch)["loss"].scalar();
//     host.save("trained.npz");
//
// As a program, which prints what host.py does:
//
//     g++ -std=c++17 -O2 -DONNXGRAD_HOST_MAIN -x c++ device/host.hpp -lonnxruntime -o host
//     ./host train.npz --epochs 2 --batch-size 32 [--parts 4] [--threads 1] [--save trained.npz] [--folder device]
//                [--small 1]
//
// It reads contract.json, state.npz and the models in a folder. Arrays of .npz files are read where they are stored and
// not compressed, as numpy.savez writes them. Calls of one Host must not overlap. Needs a little-endian machine.
#ifndef ONNXGRAD_HOST_HPP
#define ONNXGRAD_HOST_HPP

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace onnxgrad {

constexpr int kVersion = 1;

// What a user can mend: said in one line.
struct HostError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct ElementType {
  const char* name;   // in contract.json
  const char* descr;  // in .npy files
  ONNXTensorElementDataType onnx;
  size_t size;  // bytes
};

inline const std::vector<ElementType>& element_types() {
  static const std::vector<ElementType> all = {
      {"float32", "<f4", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
      {"float64", "<f8", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
      {"float16", "<f2", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
      {"int64", "<i8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
      {"int32", "<i4", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
      {"int16", "<i2", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, 2},
      {"int8", "|i1", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1},
      {"uint64", "<u8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, 8},
      {"uint32", "<u4", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, 4},
      {"uint16", "<u2", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, 2},
      {"uint8", "|u1", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},
      {"bool", "|b1", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1},
  };
  return all;
}

// An array in C order.
struct Array {
  const ElementType* type = &element_types()[0];
  std::vector<int64_t> shape;
  std::vector<char> bytes;

  // An array of `shape` with these elements; T is float, double or an integer.
  template <class T>
  static Array of(std::vector<int64_t> shape, const std::vector<T>& elements) {
    Array made;
    made.type = &by_onnx(Ort::TypeToTensorType<T>::type);
    made.shape = std::move(shape);
    if (made.count() != elements.size()) throw HostError("an array has another number of elements than its shape");
    made.bytes.resize(elements.size() * sizeof(T));
    std::memcpy(made.bytes.data(), elements.data(), made.bytes.size());
    return made;
  }

  static const ElementType& by_onnx(ONNXTensorElementDataType onnx) {
    for (const ElementType& type : element_types())
      if (type.onnx == onnx) return type;
    throw HostError("this host has no arrays of ONNX's element type " + std::to_string(onnx));
  }

  size_t count() const {
    size_t product = 1;
    for (int64_t n : shape) product *= static_cast<size_t>(n);
    return product;
  }

  // The first element, of an array of floats.
  double scalar() const {
    if (bytes.size() < type->size) throw HostError("an array without elements has no first one");
    if (type->onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return *reinterpret_cast<const float*>(bytes.data());
    if (type->onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) return *reinterpret_cast<const double*>(bytes.data());
    if (type->onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16)
      return reinterpret_cast<const Ort::Float16_t*>(bytes.data())->ToFloat();
    throw HostError(std::string("an array of ") + type->name + " is no array of floats");
  }

  // Rows `low` up to `high`, which is left out.
  Array rows(int64_t low, int64_t high) const {
    const size_t row = shape[0] ? bytes.size() / static_cast<size_t>(shape[0]) : 0;
    Array part;
    part.type = type;
    part.shape = shape;
    part.shape[0] = high - low;
    part.bytes.assign(bytes.begin() + low * row, bytes.begin() + high * row);
    return part;
  }
};

using Batch = std::map<std::string, Array>;

namespace files {

inline std::vector<char> read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.good() && !file.eof()) throw HostError("cannot read " + path.string());
  return bytes;
}

template <class T>
T number(const std::vector<char>& bytes, size_t at) {
  T found;
  if (at + sizeof(T) > bytes.size()) throw HostError("a file ends too early");
  std::memcpy(&found, bytes.data() + at, sizeof(T));
  return found;
}

template <class T>
void put(std::vector<char>& bytes, T number) {
  const char* from = reinterpret_cast<const char*>(&number);
  bytes.insert(bytes.end(), from, from + sizeof(T));
}

inline uint32_t crc32(const char* bytes, size_t count) {
  static const std::vector<uint32_t> table = [] {
    std::vector<uint32_t> made(256);
    for (uint32_t i = 0; i < 256; i++) {
      uint32_t c = i;
      for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      made[i] = c;
    }
    return made;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (size_t i = 0; i < count; i++) crc = table[(crc ^ static_cast<uint8_t>(bytes[i])) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

// The array in the .npy file that lies at `at` (numpy's format, version 1 to 3).
inline Array read_npy(const std::vector<char>& file, size_t at, size_t size, const std::string& name) {
  const std::string damaged = "the array " + name + " is damaged";
  if (size < 12 || at + size > file.size() || std::memcmp(file.data() + at, "\x93NUMPY", 6)) throw HostError(damaged);
  const bool narrow = file[at + 6] == 1;
  const size_t begin = narrow ? 10 : 12;
  const size_t length = narrow ? number<uint16_t>(file, at + 8) : number<uint32_t>(file, at + 8);
  if (begin + length > size) throw HostError(damaged);
  const std::string head(file.data() + at + begin, length);
  const auto value = [&](const std::string& key) {
    const size_t found = head.find("'" + key + "':");
    if (found == std::string::npos) throw HostError(damaged);
    return head.substr(head.find_first_not_of(' ', found + key.size() + 3));
  };
  if (value("fortran_order").rfind("False", 0) != 0)
    throw HostError("the array " + name + " is in Fortran order\n  hint: numpy.ascontiguousarray");
  Array array;
  array.type = nullptr;
  for (const ElementType& type : element_types())
    if (value("descr").rfind("'" + std::string(type.descr) + "'", 0) == 0) array.type = &type;
  if (!array.type) throw HostError("the array " + name + " has a type that this host does not read: " + value("descr"));
  const std::string shape = value("shape").substr(1);
  for (size_t i = 0; i < shape.size() && shape[i] != ')';) {
    size_t used = 0;
    if (shape[i] >= '0' && shape[i] <= '9') array.shape.push_back(std::stoll(shape.substr(i), &used));
    i += std::max<size_t>(used, 1);
  }
  if (array.count() * array.type->size != size - begin - length) throw HostError(damaged);
  array.bytes.assign(file.begin() + at + begin + length, file.begin() + at + size);
  return array;
}

// The arrays of an .npz file: a zip archive of .npy files, which lie in it uncompressed.
inline Batch read_npz(const std::filesystem::path& path) {
  const std::vector<char> file = read(path);
  const std::string damaged = path.string() + " is no .npz file of less than 4 GB, or is damaged";
  size_t end = file.size() < 22 ? std::string::npos : file.size() - 22;
  while (end != std::string::npos && number<uint32_t>(file, end) != 0x06054b50u) end = end ? end - 1 : std::string::npos;
  if (end == std::string::npos) throw HostError(damaged);
  Batch arrays;
  size_t at = number<uint32_t>(file, end + 16);
  for (int left = number<uint16_t>(file, end + 10); left > 0; left--) {
    if (number<uint32_t>(file, at) != 0x02014b50u) throw HostError(damaged);
    const size_t length = number<uint16_t>(file, at + 28), size = number<uint32_t>(file, at + 24);
    const size_t local = number<uint32_t>(file, at + 42);
    std::string name(file.data() + at + 46, length);
    if (number<uint16_t>(file, at + 10) != 0)
      throw HostError(path.string() + " is compressed\n  hint: write it with numpy.savez");
    const size_t data = local + 30 + number<uint16_t>(file, local + 26) + number<uint16_t>(file, local + 28);
    if (data + size > file.size() || crc32(file.data() + data, size) != number<uint32_t>(file, at + 16))
      throw HostError(damaged);
    if (name.size() > 4 && name.substr(name.size() - 4) == ".npy") name.resize(name.size() - 4);
    arrays[name] = read_npy(file, data, size, name);
    at += 46 + length + number<uint16_t>(file, at + 30) + number<uint16_t>(file, at + 32);
  }
  return arrays;
}

// Write `arrays` as an .npz file, completely or not at all.
inline void write_npz(const std::filesystem::path& path, const Batch& arrays) {
  std::vector<char> file, index;
  for (const auto& [name, array] : arrays) {
    std::string shape;
    for (int64_t n : array.shape) shape += std::to_string(n) + ", ";
    std::string head = std::string("{'descr': '") + array.type->descr + "', 'fortran_order': False, 'shape': (" + shape + "), }";
    head.append(63 - (10 + head.size()) % 64, ' ');
    head += '\n';
    std::vector<char> member = {'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0};
    put<uint16_t>(member, static_cast<uint16_t>(head.size()));
    member.insert(member.end(), head.begin(), head.end());
    member.insert(member.end(), array.bytes.begin(), array.bytes.end());
    if (file.size() + member.size() > 0xFFFFFFF0u) throw HostError("the state is larger than a zip file can be, 4 GiB");
    const std::string called = name + ".npy";
    const auto described = [&](std::vector<char>& into) {
      for (uint16_t n : {20, 0x800, 0, 0, 33}) put<uint16_t>(into, n);  // version, UTF-8, stored, no time: 1980-01-01
      put<uint32_t>(into, crc32(member.data(), member.size()));
      for (int k = 0; k < 2; k++) put<uint32_t>(into, static_cast<uint32_t>(member.size()));
      put<uint16_t>(into, static_cast<uint16_t>(called.size()));
      put<uint16_t>(into, 0);
    };
    put<uint32_t>(index, 0x02014b50u);
    put<uint16_t>(index, 20);
    described(index);
    for (int k = 0; k < 3; k++) put<uint16_t>(index, 0);
    put<uint32_t>(index, 0);
    put<uint32_t>(index, static_cast<uint32_t>(file.size()));
    index.insert(index.end(), called.begin(), called.end());
    put<uint32_t>(file, 0x04034b50u);
    described(file);
    file.insert(file.end(), called.begin(), called.end());
    file.insert(file.end(), member.begin(), member.end());
  }
  const uint32_t begin = static_cast<uint32_t>(file.size());
  file.insert(file.end(), index.begin(), index.end());
  put<uint32_t>(file, 0x06054b50u);
  put<uint32_t>(file, 0);
  for (int k = 0; k < 2; k++) put<uint16_t>(file, static_cast<uint16_t>(arrays.size()));
  put<uint32_t>(file, static_cast<uint32_t>(index.size()));
  put<uint32_t>(file, begin);
  put<uint16_t>(file, 0);
  const std::filesystem::path partial = path.string() + ".partial";
  std::ofstream out(partial, std::ios::binary);
  out.write(file.data(), static_cast<std::streamsize>(file.size()));
  out.close();
  std::error_code failed;
  if (out) std::filesystem::rename(partial, path, failed);
  if (!out || failed) throw HostError("cannot write " + path.string());
}

}  // namespace files

// The state, and the models that read and replace it.
class Host {
 public:
  nlohmann::json contract;
  Batch state;                          // by name
  std::map<std::string, double> rates;  // fed where a call names no other

  // The host of the export in `folder`. `threads`: 0 leaves the number to the runtime. `small`: memory before speed, with
  // one thread, no arena, no memory patterns, and weights that are not packed a second time.
  // Throws HostError for a contract of another version, or a state that does not match it.
  explicit Host(std::filesystem::path folder, int threads = 0, bool small = false)
      : folder_(std::move(folder)), threads_(small ? 1 : threads), small_(small) {
    const std::vector<char> text = files::read(folder_ / "contract.json");
    contract = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
    if (!contract.is_object()) throw HostError("cannot read " + (folder_ / "contract.json").string());
    if (contract.value("version", 0) != kVersion)
      throw HostError("contract.json has version " + contract.value("version", nlohmann::json()).dump() +
                      "; this host reads version " + std::to_string(kVersion) +
                      "\n  hint: take the host.hpp that export-step wrote beside it");
    if (plan().value("small", false)) small_ = true, threads_ = 1;
    for (const auto& [name, value] : contract["rates"].items()) rates[name] = value.get<double>();
    load(folder_ / "state.npz");
  }

  // Run one model of the contract on the state: what it renews is kept, its results are returned.
  Batch run(const std::string& model, const Batch& batch = {}, const std::map<std::string, double>& with = {}) {
    if (!contract["models"].contains(model)) throw HostError("this export has no " + model + ".onnx");
    const nlohmann::json& about = contract["models"][model];
    Ort::Session& session = session_of(model, about["file"].get<std::string>());
    Batch scalars;
    for (const auto& name : about["rates"]) {
      const auto given = with.find(name);
      const auto known = rates.find(name);
      const double value = given != with.end() ? given->second : known != rates.end() ? known->second : 0.0;
      const bool wide = types_[model][name] == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
      scalars[name] = wide ? Array::of<double>({}, {value}) : Array::of<float>({}, {static_cast<float>(value)});
    }
    std::vector<std::string> names;
    std::vector<Ort::Value> values;
    const auto feed = [&](const std::string& input, const Array& array) {
      const ONNXTensorElementDataType wanted = types_[model][input];
      if (array.type->onnx != wanted)
        throw HostError(model + ".onnx takes " + Array::by_onnx(wanted).name + " for " + input + ", not " + array.type->name);
      names.push_back(input);
      values.push_back(Ort::Value::CreateTensor(memory_, const_cast<char*>(array.bytes.data()), array.bytes.size(),
                                                array.shape.data(), array.shape.size(), array.type->onnx));
    };
    for (const std::string name : about["batch"]) {
      if (!batch.count(name)) throw HostError(model + ".onnx takes " + name + ", which the batch does not have");
      feed(name, batch.at(name));
    }
    for (const auto& [name, ends] : about["state"].items()) feed(ends["input"], state.at(name));
    for (const std::string name : about["reads"]) feed(name, state.at(name));
    for (const auto& [name, array] : scalars) feed(name, array);
    std::vector<std::string> wanted;
    for (const auto& [name, ends] : about["state"].items()) wanted.push_back(ends["output"]);
    for (const std::string name : about["results"])
      if (std::find(wanted.begin(), wanted.end(), name) == wanted.end()) wanted.push_back(name);
    std::vector<const char*> ins, outs;
    for (const std::string& name : names) ins.push_back(name.c_str());
    for (const std::string& name : wanted) outs.push_back(name.c_str());
    std::vector<Ort::Value> given;
    try {
      given = session.Run(Ort::RunOptions{}, ins.data(), values.data(), values.size(), outs.data(), outs.size());
    } catch (const Ort::Exception& error) {
      throw HostError(model + ".onnx does not run: " + first_line(error.what()));
    }
    Batch found, results;
    for (size_t i = 0; i < wanted.size(); i++) {
      found[wanted[i]] = copied(given[i]);
      given[i] = Ort::Value{nullptr};  // one copy at a time is there twice
    }
    for (const std::string name : about["results"]) results[name] = found.at(name);
    for (const auto& [name, ends] : about["state"].items()) state[name] = std::move(found.at(ends["output"]));
    return results;
  }

  // One step, in parts where the contract plans it; its results.
  Batch step(const Batch& batch) {
    const int parts = plan().value("parts", 1);
    return parts == 1 ? run("train", batch) : step_in_parts(batch, parts);
  }

  // How `export-step --peak` plans steps: batch_size, parts and small; empty without it.
  nlohmann::json plan() const { return contract.value("plan", nlohmann::json::object()); }

  // One step from the gradients of parts of the batch, added up; the loss of the batch.
  Batch step_in_parts(const Batch& batch, int parts) {
    const int64_t count = rows_of(batch), cut = std::min<int64_t>(parts, count);
    double sum = 0, total = 0;
    for (int64_t k = 0, low = 0; k < cut; k++) {
      const int64_t high = low + count / cut + (k < count % cut ? 1 : 0);
      Batch part;
      for (const auto& [name, array] : batch) part[name] = array.rows(low, high);
      const Batch results = run("gradient", part, {{"gradient_keep", k ? 1.0 : 0.0}});
      const bool averaged = results.count("batch_weight");  // not a sum
      const double weight = averaged ? results.at("batch_weight").scalar() : 1;
      if (weight) sum += results.at(contract["loss"]).scalar() * weight;  // a mean over nothing is no number
      total = averaged ? total + weight : 1;
      low = high;
    }
    run("update");
    return {{contract["loss"], Array::of<double>({}, {sum / total})}};
  }

  // Write the state to `path`, an .npz file.
  void save(const std::filesystem::path& path) const { files::write_npz(path, state); }

  // Go on from a state that was saved. Throws HostError for one of another model.
  void load(const std::filesystem::path& path) {
    Batch found = files::read_npz(path);
    for (const auto& [name, about] : contract["state"].items()) {
      const auto at = found.find(name);
      if (at == found.end()) throw HostError("the state lacks " + name + ", which contract.json names");
      if (about["dtype"] != at->second.type->name || about["shape"].get<std::vector<int64_t>>() != at->second.shape)
        throw HostError("the state is of another model: " + name + " has another type or shape than in contract.json");
    }
    for (const auto& [name, array] : found)
      if (!contract["state"].contains(name))
        throw HostError("the state is of another model: it has " + name + ", which contract.json does not name");
    state = std::move(found);
  }

  // How many rows the arrays of a batch have. Throws HostError if they differ.
  static int64_t rows_of(const Batch& batch) {
    int64_t rows = -1;
    for (const auto& [name, array] : batch) {
      if (array.shape.empty() || (rows >= 0 && array.shape[0] != rows))
        throw HostError("the arrays of the data must have rows, all as many");
      rows = array.shape[0];
    }
    if (rows < 1) throw HostError("the data have no rows");
    return rows;
  }

 private:
  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  static Array copied(const Ort::Value& value) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    Array array;
    array.type = &Array::by_onnx(info.GetElementType());
    array.shape = info.GetShape();
    const char* from = static_cast<const char*>(value.GetTensorRawData());
    array.bytes.assign(from, from + array.count() * array.type->size);
    return array;
  }

  Ort::Session& session_of(const std::string& model, const std::string& file) {
    auto& session = sessions_[model];
    if (session) return *session;
    try {
      Ort::SessionOptions options;
      if (threads_) options.SetIntraOpNumThreads(threads_);
      if (small_) {
        options.DisableCpuMemArena().DisableMemPattern();
        options.AddConfigEntry("session.disable_prepacking", "1");
      }
      session = std::make_unique<Ort::Session>(environment_, (folder_ / file).c_str(), options);
    } catch (const Ort::Exception& error) {
      throw HostError("cannot load " + file + ": " + first_line(error.what()));
    }
    Ort::AllocatorWithDefaultOptions allocator;
    for (size_t i = 0; i < session->GetInputCount(); i++)
      types_[model][session->GetInputNameAllocated(i, allocator).get()] =
          session->GetInputTypeInfo(i).GetTensorTypeAndShapeInfo().GetElementType();
    return *session;
  }

  std::filesystem::path folder_;
  int threads_;
  bool small_;
  Ort::Env environment_{ORT_LOGGING_LEVEL_ERROR, "onnxgrad"};
  Ort::MemoryInfo memory_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::map<std::string, std::unique_ptr<Ort::Session>> sessions_;
  std::map<std::string, std::map<std::string, ONNXTensorElementDataType>> types_;
};

// Train on the arrays of an .npz file; the exit status.
inline int train(int count, char** given) {
  std::map<std::string, std::string> options = {{"--epochs", "1"},  {"--batch-size", ""}, {"--parts", ""},
                                                {"--threads", "0"}, {"--save", ""},       {"--folder", ""},
                                                {"--small", "0"}};
  try {
    std::string data;
    for (int i = 1; i < count; i++) {
      const std::string word = given[i];
      if (word.rfind("--", 0) == 0) {
        if (!options.count(word) || i + 1 == count) throw HostError("no such option, or no value: " + word);
        options[word] = given[++i];
      } else {
        data = word;
      }
    }
    if (data.empty()) throw HostError("say which .npz file: host train.npz");
    const auto whole = [&](const std::string& name, long least) {
      char* end = nullptr;
      const long value = std::strtol(options[name].c_str(), &end, 10);
      if (options[name].empty() || *end || value < least) throw HostError(name + " takes a whole number, not " + options[name]);
      return value;
    };
    const std::filesystem::path own = std::filesystem::path(given[0]).parent_path();
    Host host(options["--folder"].empty() ? own : std::filesystem::path(options["--folder"]),
              static_cast<int>(whole("--threads", 0)), whole("--small", 0) != 0);
    if (options["--batch-size"].empty()) options["--batch-size"] = std::to_string(host.plan().value("batch_size", 32));
    if (options["--parts"].empty()) options["--parts"] = std::to_string(host.plan().value("parts", 1));
    const long epochs = whole("--epochs", 1), size = whole("--batch-size", 1), parts = whole("--parts", 1);
    const Batch arrays = files::read_npz(data);
    const int64_t rows = Host::rows_of(arrays);
    for (long epoch = 1; epoch <= epochs; epoch++) {
      for (int64_t low = 0; low < rows; low += size) {
        Batch batch;
        for (const auto& [name, array] : arrays) batch[name] = array.rows(low, std::min<int64_t>(low + size, rows));
        Batch found = parts == 1 ? host.run("train", batch) : host.step_in_parts(batch, static_cast<int>(parts));
        std::printf("epoch %ld  loss %.17g\n", epoch, found.at(host.contract["loss"]).scalar());
        std::fflush(stdout);
      }
    }
    if (!options["--save"].empty()) host.save(options["--save"]);
    return 0;
  } catch (const HostError& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}

}  // namespace onnxgrad

#ifdef ONNXGRAD_HOST_MAIN
int main(int count, char** given) { return onnxgrad::train(count, given); }
#endif
#endif

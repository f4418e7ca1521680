// What an operator is: whether it may be called again, what it writes, how its operations are counted. Most of that follows
// from its schema and its tags, and the rest from a row of the table in saving/operators.py.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace leannorm::recording {

enum class Kind : uint8_t {
  kSkip,     // composites and views: the log has the calls that they make, and the memory that they show
  kOnce,     // never called again: random numbers, collectives, uninitialized memory
  kCheap,    // limited by the memory's bandwidth
  kSum,      // cheap, adds two tensors
  kProduct,  // many operations per byte
};
enum class Formula : uint8_t { kNone, kMatrix, kConvolution, kAttention };

// An argument of the call that replaces another one: nothing, an argument of that call, or one of its results.
struct Source {
  enum : uint8_t { kNothing, kArgument, kResult } of;
  int at;
};

// A row of Python's table. Positions count the schema's arguments.
struct Row {
  Kind kind;
  Formula formula = Formula::kNone;
  std::vector<int> writes;       // arguments that it writes although its schema does not say so
  int gate = -1;                 // the argument that must be true for it to write
  bool fills = false;            // it works in place, and never reads the old contents
  bool moves = false;            // it only moves elements
  std::string instead;           // the operator that computes its first result from its other results
  std::vector<Source> sources;   // that operator's arguments; empty: see `Rule::by_statistics`
  std::string act;               // leannorm's name of the activation that it computes
};

struct Rule {
  std::string name;
  uint64_t id = 0;  // of its schema
  Kind kind = Kind::kOnce;
  Formula formula = Formula::kNone;
  std::optional<c10::OperatorHandle> op, again, instead;
  std::vector<Source> sources;
  c10::SmallVector<int, 2> writes;
  int gate = -1;
  bool edits = false;       // its result is its first argument, which it writes
  bool functional = false;  // `again` returns as a new tensor what `op` writes
  bool fills = false;
  bool moves = false;       // it only moves elements: calls give the same bits, whatever the values are
  bool reshapes = false;    // it works in place, but only changes how the tensor shows its memory
  bool ours = false;        // it is leannorm's, whose autograd functions call it below autograd
  bool sends = false;       // it sends to other ranks, which would not repeat it
  bool varies = false;      // its threads on a device add in any order
  bool whole = false;       // it is torch's, and calls other operators below autograd only
  std::atomic<int> parts = 0;  // how many others it has called below autograd, at most
  int dropout = -1;         // the argument that is dropout's probability
  std::string act;
  bool by_statistics = false;  // torch's batch norm: `instead` gets the scale and shift that follow from its statistics
};

inline std::unordered_map<std::string, Row>& table() {
  static auto* const rows = new std::unordered_map<std::string, Row>();
  return *rows;
}

inline std::unordered_set<std::string>& varying() {  // Python's list, without variants in place
  static auto* const names = new std::unordered_set<std::string>();
  return *names;
}

inline std::optional<c10::OperatorHandle> operator_named(const std::string& name) {
  const auto dot = name.find('.');
  return c10::Dispatcher::singleton().findSchema({name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
}

// Whether the operator sends. (Schemas of c10d do not say what its operators write: their first argument, or nothing.)
inline bool sends(const std::string& name) {
  for (const char* space : {"c10d::", "fsdp::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::", "_dtensor::", "symm_mem::"})
    if (name.rfind(space, 0) == 0) return true;
  return false;
}

inline std::unique_ptr<Rule> rule_of(const c10::OperatorHandle& op) {
  auto made = std::make_unique<Rule>();
  const auto& name = op.operator_name();
  const auto& schema = op.schema();
  made->name = name.name, made->id = std::hash<std::string>()(toString(schema));
  made->ours = name.name.rfind("leannorm::", 0) == 0;
  made->op = made->again = op;
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (const auto* alias = schema.arguments()[i].alias_info(); alias && alias->isWrite()) made->writes.push_back(i);
  const bool mutates = !made->writes.empty();  // then autograd may copy an argument first
  for (const char* name : {"dropout_p", "dropout"})
    if (const auto at = schema.argumentIndexWithName(name)) made->dropout = *at;
  made->sends = sends(made->name);
  const bool in_place = !made->name.empty() && made->name.back() == '_';
  made->varies = varying().count(in_place ? made->name.substr(0, made->name.size() - 1) : made->name) > 0;
  if (made->name.rfind("c10d::", 0) == 0 && made->name != "c10d::send") made->writes.push_back(0);
  if (made->name == "fsdp::split_with_sizes_copy") made->writes.clear();  // gathered weights get the contents that they had before
  bool shows = false, seeded = false, reshapes = false;  // a view of an argument; random numbers; as `Rule::reshapes`
  for (const auto& result : schema.returns()) shows |= result.alias_info() && made->writes.empty();
  for (const at::Tag tag : op.getTags()) seeded |= tag == at::Tag::nondeterministic_seeded, reshapes |= tag == at::Tag::inplace_view;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) || shows) made->kind = Kind::kSkip;
  else made->kind = seeded || made->sends ? Kind::kOnce : Kind::kCheap;
  const auto row = table().find(name.name);
  const auto gated_by = [&] { return static_cast<size_t>(row->second.gate); };
  const auto is_of_overload = [&] {  // another overload may have other arguments
    return row->second.gate < 0 || (gated_by() < schema.arguments().size() && schema.arguments()[gated_by()].type()->kind() == c10::TypeKind::BoolType);
  };
  if (row != table().end() && is_of_overload()) {
    const Row& of = row->second;
    made->kind = of.kind, made->formula = of.formula, made->gate = of.gate, made->fills = of.fills, made->moves = of.moves, made->act = of.act;
    made->writes.append(of.writes.begin(), of.writes.end());
    if (!of.instead.empty()) made->instead = operator_named(of.instead), made->sources = of.sources;
    made->by_statistics = made->instead && made->sources.empty();
  }
  made->whole = made->kind != Kind::kSkip && !mutates && name.name.rfind("aten::", 0) == 0 && op.hasKernelForDispatchKey(c10::DispatchKey::Autograd) &&
                !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (reshapes && made->kind == Kind::kCheap) {
    made->reshapes = true, made->kind = Kind::kOnce;
    return made;
  }
  const bool writes = !made->writes.empty() && made->gate < 0;
  if (!writes || made->kind == Kind::kOnce || made->kind == Kind::kSkip) return made;
  const auto& written = schema.arguments()[made->writes[0]];
  made->edits = made->writes.size() == 1 && made->writes[0] == 0 && name.name.back() == '_' &&
                written.type()->kind() == c10::TypeKind::TensorType;
  if (made->edits) {
    const auto pure = c10::Dispatcher::singleton().findSchema({name.name.substr(0, name.name.size() - 1), name.overload_name});
    made->functional = pure && pure->schema().arguments().size() == schema.arguments().size();
    if (made->functional) made->again = pure;
  } else if (!made->instead) {
    made->kind = Kind::kOnce;
  } else {
    made->again.reset();  // a second call would write again
  }
  return made;
}

// The rules that one thread has looked up, by the addresses of an operator's names, which live as long as the operator. The
// rules themselves are never freed, as a log may be read after the thread of its forward pass has ended.
class Rules {
 public:
  Rule* of(const at::RecordFunction& call) {
    const std::pair<const char*, const char*> key{call.name(), call.overload_name()};
    const auto known = by_name_.find(key);
    if (known != by_name_.end()) return known->second;
    const auto name = call.operator_name();
    // not an operator: its name is that of a Python class, which may end, so that another name gets the address
    if (!name) return std::strcmp(call.name(), "CompiledFunction") == 0 ? compiled() : nullptr;
    const auto op = c10::Dispatcher::singleton().findSchema(*name);
    return by_name_.emplace(key, op ? only(rule_of(*op)) : nullptr).first->second;
  }
  // Whether the call runs a compiled graph: it is an autograd function, of which only the name is known.
  static bool is_compiled(const Rule* rule) { return rule == compiled(); }
  // Forgets the operators of other libraries: one may have been unloaded, and another loaded at its addresses.
  void forget_others() {
    for (auto one = by_name_.begin(); one != by_name_.end();) {
      const bool lasts = one->second != nullptr && (one->second->ours || one->second->name.rfind("aten::", 0) == 0);
      one = lasts ? std::next(one) : by_name_.erase(one);
    }
  }

 private:
  struct Hash {
    size_t operator()(const std::pair<const char*, const char*>& k) const {
      return reinterpret_cast<size_t>(k.first) * 31 ^ reinterpret_cast<size_t>(k.second);
    }
  };
  ska::flat_hash_map<std::pair<const char*, const char*>, Rule*, Hash> by_name_;

  static Rule* compiled() {
    static auto* const rule = new Rule();
    return rule;
  }

  // The rule that an earlier call made for the same operator, if there is one.
  static Rule* only(std::unique_ptr<Rule> made) {
    static auto* const all = new std::unordered_map<uint64_t, std::vector<std::unique_ptr<Rule>>>();
    static auto* const mutex = new std::mutex();
    const std::lock_guard lock(*mutex);
    auto& others = (*all)[made->id];
    for (const auto& other : others)
      if (*other->op == *made->op && other->again == made->again && other->kind == made->kind) return other.get();
    return others.emplace_back(std::move(made)).get();
  }
};

}  // namespace leannorm::recording

// What an operator is: may its call be made again, what does it write, how many operations does it take. Its schema and
// its tags say most; a row of the table in saving/operators.py says the rest.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace leannorm::recording {

enum class Kind : uint8_t {
  kSkip,     // composites and views: the calls that they make, or the memory that they show, say it all
  kOnce,     // never called again: random numbers, collectives, memory without contents
  kCheap,    // at the speed of memory
  kSum,      // cheap, of two tensors
  kProduct,  // many operations a byte
};
enum class Formula : uint8_t { kNone, kMatrix, kConvolution, kAttention };

// An argument of the call that is made in the place of the first one: none, an argument of that, or one of its results.
struct Source {
  enum : uint8_t { kNothing, kArgument, kResult } of;
  int at;
};

// A row of Python's table. Positions count the schema's arguments.
struct Row {
  Kind kind;
  Formula formula = Formula::kNone;
  std::vector<int> writes;       // arguments that it writes without its schema saying so
  int gate = -1;                 // the argument without which it writes nothing
  bool fills = false;            // in place, and never reads what was there
  std::string instead;           // the operator that makes its first result from others of its results
  std::vector<Source> sources;   // that operator's arguments
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
  bool edits = false;       // its result is its first argument, written
  bool functional = false;  // `again` makes a new tensor of what `op` writes
  bool fills = false;
  bool reshapes = false;    // in place, and only how the tensor shows its memory
  bool ours = false;        // of leannorm, whose autograd functions call it below autograd
  bool sends = false;       // to other ranks, which do not repeat it
  bool varies = false;      // on a device, where threads add in any order
  int dropout = -1;         // the argument that is dropout's probability
  bool by_statistics = false;  // batch norm: by the scale and shift that its statistics give
};

inline std::unordered_map<std::string, Row>& table() {
  static auto* const rows = new std::unordered_map<std::string, Row>();
  return *rows;
}

inline std::unordered_set<std::string>& varying() {  // Python's list, without those in place
  static auto* const names = new std::unordered_set<std::string>();
  return *names;
}

inline std::optional<c10::OperatorHandle> operator_named(const std::string& name) {
  const auto dot = name.find('.');
  return c10::Dispatcher::singleton().findSchema({name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
}

// Operators that send. What those of c10d write, their schemas do not say: the first argument, or nothing.
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
  for (const char* name : {"dropout_p", "dropout"})
    if (const auto at = schema.argumentIndexWithName(name)) made->dropout = *at;
  made->sends = sends(made->name);
  const bool in_place = !made->name.empty() && made->name.back() == '_';
  made->varies = varying().count(in_place ? made->name.substr(0, made->name.size() - 1) : made->name) > 0;
  if (made->name.rfind("c10d::", 0) == 0 && made->name != "c10d::send") made->writes.push_back(0);
  if (made->name == "fsdp::split_with_sizes_copy") made->writes.clear();  // weights come back to where they were before
  bool shows = false, seeded = false, reshapes = false;  // a view of an argument; random numbers; as `Rule::reshapes`
  for (const auto& result : schema.returns()) shows |= result.alias_info() && made->writes.empty();
  for (const at::Tag tag : op.getTags()) seeded |= tag == at::Tag::nondeterministic_seeded, reshapes |= tag == at::Tag::inplace_view;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) || shows) made->kind = Kind::kSkip;
  else made->kind = seeded || made->sends ? Kind::kOnce : Kind::kCheap;
  const auto row = table().find(name.name);
  const auto gated_by = [&] { return static_cast<size_t>(row->second.gate); };
  const auto is_of_overload = [&] {  // not where another overload has other arguments
    return row->second.gate < 0 || (gated_by() < schema.arguments().size() && schema.arguments()[gated_by()].type()->kind() == c10::TypeKind::BoolType);
  };
  if (row != table().end() && is_of_overload()) {
    const Row& of = row->second;
    made->kind = of.kind, made->formula = of.formula, made->gate = of.gate, made->fills = of.fills;
    made->writes.append(of.writes.begin(), of.writes.end());
    if (of.instead == "scale and shift") made->by_statistics = true;
    else if (!of.instead.empty()) made->instead = operator_named(of.instead), made->sources = of.sources;
  }
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

// One thread's rules by the addresses of an operator's names, which live as long as the operator. The rules themselves are
// never freed: a log may be read when the thread of its forward pass has ended.
class Rules {
 public:
  Rule* of(const at::RecordFunction& call) {
    const std::pair<const char*, const char*> key{call.name(), call.overload_name()};
    const auto known = by_name_.find(key);
    if (known != by_name_.end()) return known->second;
    Rule* rule = nullptr;  // not an operator
    if (const auto name = call.operator_name()) {
      if (const auto op = c10::Dispatcher::singleton().findSchema(*name)) rule = only(rule_of(*op));
    } else if (std::strcmp(call.name(), "CompiledFunction") == 0) {
      rule = compiled();
    }
    return by_name_.emplace(key, rule).first->second;
  }
  // Is it what runs a compiled graph? That is a function of autograd, of which only the name is told.
  static bool is_compiled(const Rule* rule) { return rule == compiled(); }
  // A library of a user's may have gone, and another may have come to its addresses. Calls keep their rules, which are few.
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

  // The rule that was made before of the same operator, if one was.
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

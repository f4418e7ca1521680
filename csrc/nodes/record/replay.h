// Rebuilds values by the calls that made them, from values that are kept.
#pragma once

#include "bits.h"
#include "encode.h"
#include "fused.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <map>

namespace leannorm::recording {

// Whether the call fills all of the memory that it writes.
inline bool fills_all(const Log& log, const Call& call) {
  if (!call.rule->fills || call.before < 0 || call.reads.empty() || call.reads[0].at != 0 || call.reads[0].geometry >= 0) return false;
  const Value& x = log.values[call.before];
  return x.made.numel() * static_cast<int64_t>(c10::elementSize(x.made.dtype)) == x.storage_bytes;
}
// Whether this argument is read when the call is made again.
inline bool is_read(const Log& log, const Call& call, const Read& read) {
  if (call.by_result && !call.rule->by_statistics) {
    for (const Source& source : call.rule->sources)
      if (source.of == Source::kArgument && source.at == read.at) return true;
    return false;
  }
  if (call.rule->gate >= 0 && call.args[call.rule->gate].toBool())  // running statistics, which the call itself has updated
    for (const int at : call.rule->writes)
      if (at == read.at) return false;
  return !(fills_all(log, call) && &read == &call.reads[0]);
}
inline int result_of(const Log& log, const Call& call, int out) {
  for (const int v : call.outs)
    if (log.values[v].out == out) return v;
  return -1;
}
// The call's other results from which its first one is rebuilt, if it is.
inline c10::SmallVector<int, 2> results_read(const Call& call) {
  c10::SmallVector<int, 2> outs;
  if (!call.by_result) return outs;
  if (call.rule->by_statistics) outs = {1, 2};
  else for (const Source& source : call.rule->sources) if (source.of == Source::kResult) outs.push_back(source.at);
  return outs;
}
// Visits the values from which the call is made again, each as often as it is read.
template <class Visit> void for_inputs(const Log& log, const Call& call, const Visit& visit) {
  for (const Read& read : call.reads)
    if (is_read(log, call, read)) visit(read.value);
  for (const int out : results_read(call)) visit(result_of(log, call, out));
}

inline bool is_of_torch_or_ours(const Call& call) { return call.rule->ours || call.rule->name.rfind("aten::", 0) == 0; }

class Replay {
 public:
  // `scratch`: where a trial puts what it makes, so that nothing is kept.
  explicit Replay(Log& log, std::map<int, Tensor>* scratch = nullptr) : log_(log), scratch_(scratch) {}

  // The value as it was made, or an alias of its memory.
  Tensor value(int v) {
    Value& x = log_.values[v];
    if (x.held.defined() && !x.code && (x.copied || !x.elsewhere)) return share(x.held, x.made, x.on), checked(x, x.held);
    if (x.rebuilt.defined()) return share(x.rebuilt, x.made, x.rebuilt_on), x.rebuilt;
    if (x.code) return read_back(x);
    if (scratch_)
      if (const auto known = scratch_->find(v); known != scratch_->end()) return known->second;
    if (x.elsewhere) {
      const Tensor t = brought(v);
      (scratch_ ? (*scratch_)[v] : log_.values[v].rebuilt) = t;
      if (!scratch_) log_.values[v].rebuilt_on = stream_of(log_.values[v].made);
      return log_.values[v].elsewhere->is_other ? t : checked(log_.values[v], t);
    }
    run(x.call);
    return scratch_ ? (*scratch_)[v] : log_.values[v].rebuilt;
  }
  // A trial of the value: its call is made again, although the value is there.
  Tensor again(int v) { return run(log_.values[v].call), (*scratch_)[v]; }
  // What the user's hooks return for the value, in its layout.
  Tensor brought(int v) {
    const auto elsewhere = log_.values[v].elsewhere;
    const Geometry made = log_.values[v].made;
    Tensor t;
    {
      const Busy unseen;
      const at::AutoGradMode mode(false);
      const py::gil_scoped_acquire gil;
      t = py::cast<Tensor>(elsewhere->bring());
    }
    const Below below(made.fake);
    const bool flat = !made.fills(log_.values[v].storage_bytes);
    const int64_t n = log_.values[v].storage_bytes / static_cast<int64_t>(c10::elementSize(made.dtype));
    TORCH_CHECK(t.scalar_type() == made.dtype && t.device() == made.device && (flat ? t.numel() == n : t.sizes() == c10::IntArrayRef(made.sizes)),
                "leannorm.lean(held=...): the second hook returns the tensor that the first one got, of shape ", made.sizes, " and dtype ",
                made.dtype, " on ", made.device, "; got shape ", t.sizes(), " and dtype ", t.scalar_type(), " on ", t.device());
    elsewhere->is_other = t.storage().unsafeGetStorageImpl() != elsewhere->memory._unsafe_get_target();
    if (t.requires_grad()) t = alias_of(t);
    if (flat) return over((t.is_contiguous() && t.storage_offset() == 0 ? t : t.clone(at::MemoryFormat::Contiguous)).storage(), made);
    if (made.is_of(t)) return t;
    return at::empty_strided(made.sizes, made.strides, t.options()).copy_(t);
  }
  // A reader has read the value.
  void used(int v) {
    Value& x = log_.values[v];
    if (!scratch_ && --x.left <= 0) x.rebuilt.reset(), x.left = x.refs;
  }

 private:
  Log& log_;
  std::map<int, Tensor>* const scratch_;

  Tensor checked(const Value& x, const Tensor& t) const {
    const bool edited = !x.copied && (x.lost || !log_.is_unedited(x));
    TORCH_CHECK(!edited && is_as_sampled(x, t),
                "a tensor of shape ", x.made.sizes, " has been modified by an inplace operation after leannorm.lean()'s forward pass"
                " had read it, and is needed to rebuild another one: edit it after backward(), edit a copy of it, or leave"
                " lean() out of this step");
    return t;
  }

  // Decodes the value, once for all readers of this backward pass. A trial keeps nothing.
  Tensor read_back(Value& x) const {
    const Below below(x.made.fake);
    share(x.held, x.made, x.on);
    const Tensor t = decoded(*x.code, x.held, x.made, x.storage_bytes);
    if (scratch_) return t;
    x.rebuilt_on = stream_of(x.made);
    return x.rebuilt = t;
  }

  // What a call reads. A trial takes the memory that the pass has made, if that is still there, so that it needs little more.
  // An operator of the program might write into it unseen, and gets copies.
  Tensor read(int number, int v) {
    const Value& x = log_.values[v];
    Tensor t = scratch_ && (!x.held.defined() || x.code) ? log_.tensor_at_hand(v) : Tensor();
    if (t.defined()) share(t, x.made, x.on);
    else t = value(v);
    return scratch_ && !is_of_torch_or_ours(log_.calls[number]) ? copy_of(t, log_.values[v].made) : t;
  }

  // What a call reads, and those of its results from which it is made again.
  struct Given {
    std::vector<Tensor> read;
    std::map<int, Tensor> results;
  };
  Given given(int number) {
    Given made;
    for (const Read& one : log_.calls[number].reads) {
      if (is_read(log_, log_.calls[number], one)) made.read.push_back(shown(read(number, one.value), log_.geometry_of(one)));
      else made.read.emplace_back();
    }
    for (const int out : results_read(log_.calls[number])) made.results[out] = read(number, result_of(log_, log_.calls[number], out));
    return made;
  }
  void run(int number) {
    const int v = log_.calls[number].outs.empty() ? -1 : log_.calls[number].outs[0];
    const auto fused = scratch_ || v < 0 ? std::nullopt : fused_of(log_, v, [this](int u) { return is_passing(u); });
    const bool is_trusted = fused && trust().is_enough(fused->kind);
    if (!fused || trust().is_refused(fused->kind) || (!is_trusted && trust().is_vain(fused->kind))) return one_by_one(number);
    Tensor at_once = made_at_once(*fused);
    if (!is_trusted) return one_by_one(number), judge(fused->kind, at_once, log_.values[v].rebuilt);
    keep(v, std::move(at_once));
    if (fused->other >= 0) used(fused->other);
    for_inputs(log_, log_.calls[log_.values[fused->norm].call], [this](int in) { used(in); });
  }
  void one_by_one(int number) {
    Given given = this->given(number);
    const Call& call = log_.calls[number];
    {
      const UnderFlags flags(log_, call);
      const Below below(call.outs.empty() ? nullptr : log_.values[call.outs[0]].made.fake);
      const at::AutoGradMode mode(call.grad_mode);
      if (call.by_result) keep(result_of(log_, call, 0), made_by_results(call, given));
      else if (call.before >= 0) edit(call, given.read);
      else make(call, given.read);
    }
    for_inputs(log_, call, [this](int v) { used(v); });
  }
  // Whether the value is not in memory, and only one rebuild needs it.
  bool is_passing(int v) const {
    const Value& x = log_.values[v];
    return x.state == Value::kDropped && x.refs == 1 && x.saves == 0 && !x.held.defined() && !x.rebuilt.defined() && !x.elsewhere;
  }
  static void judge(uint64_t kind, const Tensor& at_once, const Tensor& one_by_one) {
    const Bits found = compared(at_once, one_by_one);
    trust().looked(kind);
    if (found == Bits::kOther) trust().refuse(kind);
    if (found == Bits::kSame && has_several_values(at_once)) trust().confirm(kind);
  }
  Tensor made_at_once(const Fused& fused) {
    const int number = log_.values[fused.norm].call;
    const Tensor other = fused.other < 0 ? Tensor() : shown(value(fused.other), log_.values[fused.other].made);
    const Given given = this->given(number);
    const Call& call = log_.calls[number];
    const UnderFlags flags(log_, call);
    const Below below;
    const at::AutoGradMode mode(call.grad_mode);
    return made_by_results(call, given, bare(other), fused.act);
  }

  static Tensor bare(const Tensor& t) { return t.defined() && t.requires_grad() ? alias_of(t) : t; }

  static torch::jit::Stack stack_of(const Call& call, const std::vector<Tensor>& read) {
    torch::jit::Stack stack;
    stack.reserve(call.args.size());
    size_t next = 0;
    for (size_t i = 0; i < call.args.size(); ++i) {
      const IValue& plain = call.args[i];
      const auto is_next = [&] { return next < call.reads.size() && call.reads[next].at == static_cast<int>(i); };
      if (plain.isTensorList()) {
        c10::List<Tensor> list;
        while (is_next()) list.push_back(bare(read[next++]));
        stack.emplace_back(std::move(list));
      } else if (plain.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list = plain.toOptionalTensorList().copy();
        for (; is_next(); ++next) list.set(call.reads[next].place, bare(read[next]));
        stack.emplace_back(std::move(list));
      } else if (is_next()) {
        const Tensor& t = read[next++];
        t.defined() ? stack.emplace_back(bare(t)) : stack.emplace_back();
      } else stack.push_back(plain);
    }
    return stack;
  }

  bool is_wanted(int v) const {
    const Value& x = log_.values[v];
    return scratch_ || (x.state == Value::kDropped && x.refs > 0 && !x.held.defined() && !x.rebuilt.defined());
  }
  void keep(int v, Tensor t) {
    Value& x = log_.values[v];
    if (!x.made.is_of(t)) {
      TORCH_CHECK(t.sizes() == c10::IntArrayRef(x.made.sizes) && t.scalar_type() == x.made.dtype, "leannorm.lean(): ",
                  log_.calls[x.call].rule->name, " gave another shape or dtype when it was called again");
      Tensor laid = at::empty_strided(x.made.sizes, x.made.strides, t.options());
      t = laid.copy_(t);
    }
    if (scratch_) (*scratch_)[v] = std::move(t);
    else x.rebuilt = std::move(t), x.rebuilt_on = stream_of(x.made);
  }

  // Whether the call copies a value that only the replay has. Nothing is written into either, so they may share memory.
  bool may_share(const Call& call, const std::vector<Tensor>& read) const {
    if (scratch_ || call.rule->name != "aten::clone" || call.outs.size() != 1) return false;
    const Value &x = log_.values[call.reads[0].value], &copy = log_.values[call.outs[0]];
    const bool has_all = static_cast<int64_t>(read[0].storage().nbytes()) == copy.storage_bytes;
    return !x.held.defined() && !x.elsewhere && has_all && copy.made.is_of(read[0]);
  }
  void make(const Call& call, const std::vector<Tensor>& read) {
    if (may_share(call, read)) return is_wanted(call.outs[0]) ? keep(call.outs[0], alias_of(read[0])) : void();
    auto stack = stack_of(call, read);
    call.rule->again->callBoxed(&stack);
    for (const int v : call.outs) {
      const int out = log_.values[v].out;
      if (!is_wanted(v)) continue;
      const IValue& result = stack[out < kInList ? out : 0];
      if (out >= kInList) keep(v, result.toTensorVector()[out - kInList]);
      else if (result.isTensor() && result.toTensor().defined()) keep(v, result.toTensor());
    }
  }

  // The call's first result by another operator, which reads its other results. `other`, `act`: as in `Fused`.
  Tensor made_by_results(const Call& call, const Given& given, const Tensor& other = {}, const std::string& act = "identity") const {
    const auto argument = [&](int at) -> IValue {
      for (size_t i = 0; i < call.reads.size(); ++i)
        if (call.reads[i].at == at) return IValue(bare(given.read[i]));
      return call.args[at];
    };
    torch::jit::Stack stack;
    if (call.rule->by_statistics) {
      // torch's kernel computes fma(x, scale, fma(-mean, scale, bias)), and ours the same from these arguments
      const Tensor &mean = given.results.at(1), &rstd = given.results.at(2), x = argument(0).toTensor();
      const IValue weight = argument(1), bias = argument(2);
      const Tensor scale = weight.isTensor() ? at::mul(rstd, weight.toTensor()) : rstd;
      const Tensor shift = at::addcmul(bias.isTensor() ? bias.toTensor() : at::zeros_like(mean), mean, scale, -1);
      const bool is_dense = x.is_contiguous() || x.is_contiguous(at::MemoryFormat::ChannelsLast) || x.is_contiguous(at::MemoryFormat::ChannelsLast3d);
      const auto as_double = at::TensorOptions().dtype(at::kDouble);
      torch::jit::push(stack, is_dense ? x : x.contiguous(), at::zeros_like(mean, as_double), at::ones_like(mean, as_double), scale, shift, IValue(), act, IValue());
    } else {
      for (const Source& source : call.rule->sources) {
        if (source.of == Source::kNothing) stack.emplace_back();
        else if (source.of == Source::kResult) stack.emplace_back(given.results.at(source.at));
        else stack.push_back(argument(source.at));
      }
    }
    if (other.defined()) stack[kResidual] = other;
    if (act != "identity") stack[kActivation] = act;
    call.rule->instead->callBoxed(&stack);
    return stack[0].toTensor();
  }

  // Whether the replay alone has the memory, and this reader, which has it as `t`, is the last one.
  bool is_spent(int v, const Tensor& t) const {
    const Value& x = log_.values[v];
    const bool is_last = !scratch_ && x.left == 1 && x.rebuilt.defined() && x.rebuilt.unsafeGetTensorImpl() == t.unsafeGetTensorImpl();
    return is_last && t.storage().use_count() == 1;
  }
  // Makes a call in place again: on the memory that it overwrote, where nobody else reads that; else by its variant that
  // returns a new tensor, or on a copy.
  void edit(const Call& call, std::vector<Tensor>& read) {
    const int v = call.outs[0];
    const Geometry& made = log_.values[v].made;
    const bool whole = call.reads[0].geometry < 0, fills = fills_all(log_, call);
    const bool spent = whole && !fills && is_spent(call.reads[0].value, read[0]);
    if (call.rule->functional && whole && !fills && !spent) {
      auto stack = stack_of(call, read);
      call.rule->again->callBoxed(&stack);
      return keep(v, stack[0].toTensor());
    }
    const Tensor base = fills   ? at::empty_strided(made.sizes, made.strides, at::TensorOptions().dtype(made.dtype).device(made.device))
                       : spent ? read[0]
                               : copy_of(read[0], made);
    read[0] = whole ? base : shown(base, log_.geometries[call.reads[0].geometry]);
    auto stack = stack_of(call, read);
    call.rule->op->callBoxed(&stack);
    keep(v, base);
  }

 public:
  static constexpr int kInList = 1 << 16;  // from here on `out` is a tensor's position in a list of results
};

}  // namespace leannorm::recording

// What a node shows: the tensors that it saved, as hooks have packed them, and its constants.
#pragma once

#include "evidence.h"
#include "norms.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <string>
#include <typeindex>
#include <unordered_map>
#include <vector>

namespace leannorm {

// The tensors that recipes read, of those that a class of nodes saves, by name.
struct Fields {
  std::vector<const char*> names;
  std::vector<const SavedVariable* (*)(const Node*)> of;
};

inline const std::unordered_map<std::type_index, Fields>& field_table() {
  static const auto table = [] {
    std::unordered_map<std::type_index, Fields> made;
    const auto add = [&]<class Kind, class Read>(const char* name, Read) {
      Fields& fields = made[typeid(Kind)];
      fields.names.push_back(name);
      fields.of.push_back([](const Node* node) { return Read()(static_cast<const Kind*>(node)); });
    };
#define LEANNORM_FIELD(kind, field)                                                            \
  add.template operator()<torch::autograd::generated::kind>(                                   \
      #field, [](const torch::autograd::generated::kind* node) -> const SavedVariable* { return &node->field##_; })
    LEANNORM_FIELD(SiluBackward0, self), LEANNORM_FIELD(HardswishBackward0, self);
    LEANNORM_FIELD(HardsigmoidBackward0, self), LEANNORM_FIELD(GeluBackward0, self);
    LEANNORM_FIELD(HardtanhBackward0, self), LEANNORM_FIELD(LeakyReluBackward0, self);
    LEANNORM_FIELD(MulBackward0, self), LEANNORM_FIELD(MulBackward0, other);
#define LEANNORM_NORM(kind) \
  LEANNORM_FIELD(kind, input), LEANNORM_FIELD(kind, weight), LEANNORM_FIELD(kind, result1), LEANNORM_FIELD(kind, result2)
    LEANNORM_NORM(NativeBatchNormBackward0), LEANNORM_NORM(CudnnBatchNormBackward0), LEANNORM_NORM(NativeGroupNormBackward0);
    LEANNORM_NORM(NativeLayerNormBackward0), LEANNORM_FIELD(NativeLayerNormBackward0, bias);
    LEANNORM_FIELD(FusedRmsNormBackward0, input), LEANNORM_FIELD(FusedRmsNormBackward0, weight);
    LEANNORM_FIELD(FusedRmsNormBackward0, result1);
    LEANNORM_FIELD(ConvolutionBackward0, input), LEANNORM_FIELD(ConvolutionBackward0, weight);
    LEANNORM_FIELD(MmBackward0, self), LEANNORM_FIELD(MmBackward0, mat2);
    LEANNORM_FIELD(AddmmBackward0, mat1), LEANNORM_FIELD(AddmmBackward0, mat2);
#define LEANNORM_ATTENTION(kind) LEANNORM_FIELD(kind, query), LEANNORM_FIELD(kind, key), LEANNORM_FIELD(kind, value)
    LEANNORM_ATTENTION(ScaledDotProductFlashAttentionBackward0), LEANNORM_ATTENTION(ScaledDotProductEfficientAttentionBackward0);
    LEANNORM_FIELD(ScaledDotProductEfficientAttentionBackward0, attn_bias);
    LEANNORM_ATTENTION(ScaledDotProductCudnnAttentionBackward0);
    LEANNORM_FIELD(ScaledDotProductCudnnAttentionBackward0, attn_bias);
    LEANNORM_ATTENTION(ScaledDotProductFlashAttentionForCpuBackward0);
    LEANNORM_FIELD(ScaledDotProductFlashAttentionForCpuBackward0, attn_mask);
#undef LEANNORM_ATTENTION
#undef LEANNORM_NORM
#undef LEANNORM_FIELD
    const auto add_norm = [&]<class Kind, size_t... at>(std::index_sequence<at...>) {
      (add.template operator()<Kind>(kRawNames[at] + std::strlen("_raw_saved_"),
                                     [](const Kind* node) -> const SavedVariable* { return &node->saved[at]; }), ...);
    };
    constexpr auto places = std::make_index_sequence<kSaved>();
    add_norm.template operator()<ChannelNorm>(places), add_norm.template operator()<ChannelAffine>(places);
    add_norm.template operator()<RowNorm>(places);
    return made;
  }();
  return table;
}

inline const Fields& fields_of(const Node* node) {
  static const Fields none;
  static auto* const known = new std::unordered_map<const std::type_info*, const Fields*>();  // a name is slow to hash
  const Fields*& fields = (*known)[&typeid(*node)];
  if (fields == nullptr) {
    const auto found = field_table().find(typeid(*node));
    fields = found == field_table().end() ? &none : &found->second;
  }
  return *fields;
}

// Whether it is the node of an autograd function in Python. By name: torch does not export the type.
inline bool is_python(const Node* node) {
  static const std::type_info* known = nullptr;
  const std::type_info& type = typeid(*node);
  if (known == nullptr && std::strcmp(type.name(), "N5torch8autograd6PyNodeE") == 0) known = &type;
  return known == &type;
}
// Its object; null for any other node.
inline Ref python_function(const Node* node) {
  if (!is_python(node)) return Ref();
  Ref object(torch::autograd::functionToPyObject(const_cast<Node*>(node)->getptr()));
  return object && THPFunction_Check(object.get()) ? std::move(object) : Ref();
}
// What distinguishes classes of nodes, or of functions in Python: it stays as long as the class exists.
inline const void* class_id(const Node* node, PyObject* function) {
  return function != nullptr ? static_cast<const void*>(Py_TYPE(function)) : &typeid(*node);
}
inline const void* class_id(const Node* node) { return class_id(node, python_function(node).get()); }
// The tensors that a node, or a function in Python, has saved, in order; null if it has not saved them yet.
class SavedOf {
 public:
  SavedOf(const Node* node, PyObject* function) : node_(node), fields_(fields_of(node)) {
    if (function != nullptr) own_ = &reinterpret_cast<THPFunction*>(function)->saved_variables;
  }
  const SavedVariable* operator[](size_t at) const {
    if (own_ != nullptr) return at < own_->size() ? &(*own_)[at] : nullptr;
    return at < fields_.of.size() ? fields_.of[at](node_) : nullptr;
  }

 private:
  const Node* node_;
  const Fields& fields_;
  const std::vector<SavedVariable>* own_ = nullptr;
};

// What a hook has packed the tensor as, a new reference; null if no hook has.
inline Ref packed_by_hook(const SavedVariable* saved) {
  if (!saved->has_hooks()) return Ref();
  auto data = saved->retrieve_unpack_hook_data();
  return Ref(data ? data->second.release() : nullptr);
}

inline bool is_absent(const SavedVariable* saved) {
  const auto raw = saved->get_raw_data();
  return raw.has_value() && !raw->defined();
}

template <class Kind> const Kind* as(const Node* node) {
  return typeid(*node) == typeid(Kind) ? static_cast<const Kind*>(node) : nullptr;
}

// Everything that a node shows except tensors, as `told` (`names`: of its constants); empty if it cannot be compared.
inline std::string all_told(const Node* node, PyObject* names) {
  Told told;
  told.bytes.reserve(256);
  told.put_shapes(*node);
  if (const auto* const c = as<torch::autograd::generated::ConvolutionBackward0>(node)) {  // the slowest in Python
    const auto put = [&](const std::vector<c10::SymInt>& numbers) {
      told.raw(numbers.size());
      for (const c10::SymInt& v : numbers) told.put(v);
    };
    put(c->stride), put(c->padding), put(c->dilation), put(c->output_padding);
    told.put(c->groups), told.raw(c->transposed), told.raw(c->bias_sym_sizes_opt.list.has_value());
    if (c->bias_sym_sizes_opt.list) put(*c->bias_sym_sizes_opt.list);
  } else if (const auto* const norm = as<torch::autograd::generated::NativeBatchNormBackward0>(node);
             norm != nullptr && PyTuple_GET_SIZE(names) == 2) {  // read in Python, it would keep an object of Python's
    told.raw(norm->eps), told.raw(norm->training);
  } else if (is_python(node)) {  // what its function has stored there is compared separately
  } else if (PyTuple_GET_SIZE(names) != 0) {
    const Ref object(torch::autograd::functionToPyObject(const_cast<Node*>(node)->getptr()));
    told.put_constants(object.get(), names);
  }
  return told.all ? told.bytes : std::string();
}

}  // namespace leannorm

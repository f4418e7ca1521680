// What autograd knows about a node and Python cannot ask: the thread that made it, and what it does to a view.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/utils/pybind.h>

#include <bitset>

namespace leannorm {

using torch::autograd::Node;

// Other releases of torch store the nodes of functions in Python in another way.
template <class Pointer> Node* pointed_to(const Pointer& pointer) {
  if constexpr (requires { pointer.lock(); }) return pointer.lock().get();
  else return pointer.get();
}

// The node behind one of autograd's Python objects; null for any other object.
inline Node* node_of(PyObject* object) {
  using torch::autograd::THPCppFunction;
  if (THPFunction_Check(object)) return pointed_to(reinterpret_cast<THPFunction*>(object)->cdata);
  return torch::autograd::THPCppFunction_Check(object) ? pointed_to(reinterpret_cast<THPCppFunction*>(object)->cdata)
                                                       : nullptr;
}

// thread_of(node): numbers of threads are never reused within a process.
inline PyObject* thread_of(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  Node* const node = node_of(object);
  if (node == nullptr) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(node->thread_id());
  END_HANDLE_TH_ERRORS
}

// Whether a backward pass that begins at `root` reaches the node that was saving when this was the next node's
// number. False if that is another thread's, or far away.
inline bool comes_to(const Node* root, uint64_t number) {
  constexpr uint64_t kFarthest = 1 << 14;
  const uint64_t first = number - 1, last = root->sequence_nr(), thread = root->thread_id();
  if (number == 0 || last < first || last - first >= kFarthest) return false;
  if (last == first) return true;
  std::bitset<kFarthest> seen;
  std::vector<const Node*> left{root};
  while (!left.empty()) {
    const Node* const node = left.back();
    left.pop_back();
    for (const auto& edge : node->next_edges()) {
      const Node* const before = edge.function.get();
      if (before == nullptr || before->sequence_nr() < first || before->sequence_nr() >= last) continue;  // a leaf's is larger
      if (before->thread_id() != thread || seen[before->sequence_nr() - first]) continue;
      if (before->sequence_nr() == first) return true;
      seen.set(before->sequence_nr() - first), left.push_back(before);
    }
  }
  return false;
}

// While it exists, torch's compiler leaves this thread's calls alone: after a graph break it watches everything that
// the Python code calls, and would compile our functions too.
class Unwatched {
 public:
  Unwatched() {
    if (_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != &_PyEval_EvalFrameDefault) before_ = watch(py::none());
  }
  Unwatched(const Unwatched&) = delete;
  ~Unwatched() {
    if (!before_ || before_.is_none()) return;
    const py::error_scope kept;
    try {
      watch(before_);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("leannorm");
    }
  }

 private:
  static py::object watch(const py::object& callback) {
    static const auto* const set = new py::object(
        py::getattr(py::module_::import("torch._C._dynamo.eval_frame"), "set_eval_frame", py::none()));
    return set->is_none() ? py::object() : (*set)(callback);  // a release with another name for it
  }
  py::object before_;
};

inline PyObject* layout_of(const at::TensorGeometry& geometry) {
  py::tuple sizes = py::cast(geometry.sizes().vec()), strides = py::cast(geometry.strides().vec());
  return py::make_tuple(sizes, strides, geometry.storage_offset()).release().ptr();
}

// in_view(node): what wrote into a view of a base, if `node` is the base's CopySlices: its node, and sizes, strides
// and offset of the base and of the view. None if these do not determine the view.
inline PyObject* in_view(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const auto* const slices = dynamic_cast<torch::autograd::CopySlices*>(node_of(object));
  if (slices == nullptr || !slices->fn || slices->view_fn) Py_RETURN_NONE;
  return Py_BuildValue("(NNN)", torch::autograd::functionToPyObject(slices->fn), layout_of(slices->base),
                       layout_of(slices->view));
  END_HANDLE_TH_ERRORS
}

}  // namespace leannorm

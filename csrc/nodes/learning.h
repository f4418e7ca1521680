// How memo.py passes on what a search has found, and what Python gets from this library for lean().
#pragma once

#include "memo.h"

namespace leannorm {

inline Ref object_of(py::handle from) { return borrowed(from.ptr()); }

// ---------------------------------------------------------------- kinds

inline Check check_of(py::handle from, Node* node) {
  Check made;
  made.type = class_id(node);
  made.output = from["output"].cast<uint32_t>(), made.newest = from["newest"].cast<bool>();
  made.constants = object_of(from["constants"]);
  made.told = all_told(node, made.constants.get());
  for (const py::handle edge : from["edges"])
    made.edges.push_back({static_cast<Edge::How>(edge[py::int_(0)].cast<int>()), edge[py::int_(1)].cast<int64_t>()});
  for (const py::handle sort : from["fields"]) made.fields.push_back(sort.cast<int64_t>());
  return made;
}
inline Template template_of(py::handle from) {
  Template made;
  made.check = from["check"].cast<int>(), made.products = from["products"].cast<int>();
  made.copies = from["copies"].cast<int>(), made.told_by = from["told_by"].cast<int>();
  for (const py::handle part : from["parts"])
    made.parts.push_back({static_cast<Part::How>(part[py::int_(0)].cast<int>()), part[py::int_(1)].cast<int>()});
  made.step = object_of(from["step"]), made.name = object_of(from["name"]);
  made.shape = object_of(from["shape"]), made.dtype = object_of(from["dtype"]);
  made.captured = static_cast<Template::Captured>(from["captured"].cast<int>());
  for (const py::handle input : from["inputs"]) {
    const auto [how, check, index] = input.cast<std::tuple<int, int, int>>();
    made.inputs.push_back({static_cast<Source::How>(how), check, index});
  }
  return made;
}

constexpr size_t kMostOfOneLayout = 12, kMostKinds = 8192;

// learn(tensor, next, kind): of the tensor that is packed now; returns whether there was space.
inline bool learn(Memo& memo, const Tensor& t, uint64_t next, py::handle from) {
  auto made = std::make_shared<Kind>(Kind{.device = t.device()});
  Node* const node = t.grad_fn().get();
  made->type = class_id(node), made->output = t.output_nr(), made->version = t._version();
  made->newest = node->sequence_nr() + 1 == next, made->dtype = t.scalar_type();
  made->sizes = t.sizes().vec(), made->strides = t.strides().vec();
  made->flags = object_of(from["flags"]), made->why = object_of(from["why"]);
  made->seconds = object_of(from["seconds"]), made->is_view = from["is_view"].cast<bool>();
  for (const py::handle check : from["checks"]) made->checks.push_back(check_of(check, node_of(py::object(check["node"]).ptr())));
  for (const py::handle how : from["templates"]) made->templates.push_back(template_of(how));
  made->same = from["same"].cast<std::vector<int>>(), made->base = from["base"].cast<int>();
  if (made->base >= 0) {
    const Tensor base(t._base());
    made->base_sizes = base.sizes().vec(), made->base_strides = base.strides().vec();
  }
  size_t places = 0;
  for (const Check& check : made->checks) made->first.push_back(places), places += check.fields.size() + check.edges.size();
  if (made->checks.size() > kMostChecks || places != made->same.size()) return false;
  for (const Check& check : made->checks)
    if (check.told.empty() || check.edges.size() > kMostEdges || check.fields.size() > kMostFields) return false;
  if (memo.size >= kMostKinds) memo.clear();  // shapes that never repeat
  auto& place = memo.kinds[key_of(made->type, made->output, made->version, made->newest, t)];
  auto more = place ? std::make_shared<Memo::Kinds>(*place) : std::make_shared<Memo::Kinds>();
  if (more->size() >= kMostOfOneLayout) return false;
  more->push_back(std::move(made)), ++memo.size;
  place = std::move(more);
  return true;
}

// ---------------------------------------------------------------- passes

// begin(memo, {what a pass has}): the object whose `pack` is the hook of one forward pass.
extern PyTypeObject pass_type;
inline PyObject* begin(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *memo, *given;
  if (!PyArg_ParseTuple(arguments, "OO", &memo, &given)) return nullptr;
  const py::handle from(given);
  auto made = std::make_unique<State>();
  made->memo = py::handle(memo).cast<std::shared_ptr<Memo>>();
  made->packing = object_of(from["packing"]), made->pack = object_of(from["pack"]);
  made->flags = object_of(from["flags"]);
  made->before = object_of(from["before"]), made->provenance = object_of(from["provenance"]);
  made->ledger = object_of(from["ledger"]), made->values = object_of(from["values"]);
  made->sorter = object_of(from["sorter"]), made->told_of = object_of(from["told_of"]), made->ours = object_of(from["ours"]);
  made->read = object_of(from["read"]), made->apply = object_of(from["apply"]), made->call = borrowed(Py_None);
  made->norms = object_of(from["norms"]), made->row_norms = object_of(from["row_norms"]), made->arguments = object_of(from["arguments"]);
  made->smaller = object_of(from["smaller"]), made->edited = object_of(from["edited"]), made->kept = object_of(from["kept"]);
  made->vain = object_of(from["vain"]), made->planned = object_of(from["planned"]);
  made->copied = object_of(from["copied"]), made->convolutions = object_of(from["convolutions"]), made->linear = object_of(from["linear"]);
  made->following = object_of(from["following"]), made->calls = object_of(from["calls"]), made->plan = borrowed(Py_None);
  made->now = {at::RecordFunction::currentThreadId(), at::sequence_number::peek(), 0, made->flags.get(),
               made->before.get(), made->sorter.get(), &made->memo->sorts, from["from_here"].cast<bool>(),
               from["most_in_a_row"].cast<long>(), from["most_runs"].cast<long>()};
  made->seen = from["seen"].cast<long>(), made->smallest = from["smallest"].cast<long>();
  made->largest = 0, made->much_larger = from["much_larger"].cast<long>();
  made->alone = from["alone"].cast<long>();
  made->checked = made->called = UINT64_MAX;
  made->everything = from["everything"].cast<bool>(), made->reads_weights = from["reads_weights"].cast<bool>();
  made->flags_changed = false;
  auto* const pass = PyObject_New(PassObject, &pass_type);
  if (pass != nullptr) pass->state = made.release();
  return reinterpret_cast<PyObject*>(pass);
  END_HANDLE_TH_ERRORS
}
inline void end(PyObject* self) {
  delete reinterpret_cast<PassObject*>(self)->state;
  PyObject_Free(self);
}
inline PyObject* seen_by(PyObject* self, void*) { return PyLong_FromLong(reinterpret_cast<PassObject*>(self)->state->seen); }

inline PyMethodDef pass_methods[] = {{"pack", pack, METH_O, nullptr}, {nullptr}};
inline PyGetSetDef pass_properties[] = {{"seen", seen_by, nullptr, nullptr, nullptr}, {nullptr}};
inline PyTypeObject pass_type = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "leannorm._nodes.Pass", type.tp_basicsize = sizeof(PassObject), type.tp_dealloc = end;
  type.tp_flags = Py_TPFLAGS_DEFAULT, type.tp_methods = pass_methods, type.tp_getset = pass_properties;
  return type;
}();

// fields(node): the names of the saved tensors that kinds can ask for.
inline py::tuple field_names(py::handle object) {
  const Node* const node = node_of(object.ptr());
  return py::cast(node == nullptr ? std::vector<const char*>() : fields_of(node).names);
}

// ---------------------------------------------------------------- the module

// set_lean(Value, Step, Packed, unpack, getters of flags, Value(None), COPIED_PART, the streams in use, stream_of)
inline PyObject* set_lean(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  Classes& of = classes();
  PyObject *getters, *value;
  if (!PyArg_ParseTuple(arguments, "OOOOOOOO!O", &of.value, &of.step, &of.packed, &unpacking.by_python, &getters, &value,
                        &of.copied_part, &PyDict_Type, &streams.used, &streams.by_python))
    return nullptr;
  for (PyObject* kept : {of.value, of.step, of.packed, of.copied_part, unpacking.by_python, getters}) Py_INCREF(kept);
  for (PyObject* kept : {streams.used, streams.by_python}) Py_INCREF(kept);
  all_flags().clear();
  for (const py::handle getter : py::reinterpret_borrow<py::tuple>(getters)) all_flags().emplace_back(getter.ptr());
  slots.read_from(of.value, value);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// references(tensor): to the Python object, as a hook in C sees them.
inline PyObject* references(PyObject*, PyObject* object) { return PyLong_FromSsize_t(Py_REFCNT(object)); }

inline PyMethodDef lean_functions[] = {
    {"references", references, METH_O, nullptr}, {"unpack", unpack, METH_O, nullptr}, {"rows", rows, METH_O, nullptr},
    {"set_lean", set_lean, METH_VARARGS, nullptr}, {"begin", begin, METH_VARARGS, nullptr}, {nullptr}};
inline void add_lean(py::module_ module) {
  py::class_<Memo, std::shared_ptr<Memo>>(module, "Memo", py::module_local())
      .def(py::init()).def("learn", &learn).def("clear", &Memo::clear);
  module.def("fields", &field_names).def("watch_edits", &watch_edits).def("stop_watching", &stop_watching);
  module.def("worked_in_place", &asked_in_place);
  module.def("comes_to", [](py::handle root, uint64_t number) {
    const Node* const node = node_of(root.ptr());
    return node != nullptr && comes_to(node, number);
  });
  module.def("watch_leaves", &watch_leaves).def("stop_watching_leaves", &stop_watching_leaves);
  module.def("had_other_data", [](py::handle leaf) { return had_other_data(THPVariable_Unpack(leaf.ptr())); });
  if (PyType_Ready(&pass_type) != 0 || PyModule_AddFunctions(module.ptr(), lean_functions) != 0) throw py::error_already_set();
}

}  // namespace leannorm

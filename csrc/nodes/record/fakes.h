// Fake tensors (torch's FakeTensorMode), which have sizes but no memory. The log treats them as others, but compares nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace leannorm::recording {

using at::Tensor;

// Owns Python objects, which must be released with Python's lock.
template <class Objects> std::shared_ptr<Objects> of_python(Objects objects) {
  return {new Objects(std::move(objects)), [](Objects* made) {
            const py::gil_scoped_acquire gil;
            delete made;
          }};
}

// The class of fake tensors, once it has been imported, and make(mode, meta tensor, device) -> one over the same storage.
struct Fakes {
  PyTypeObject* type = nullptr;
  py::object make;
};
inline Fakes& fakes() {
  static auto* const set = new Fakes();
  return *set;
}

inline bool is_fake(const Tensor& t) {
  if (fakes().type == nullptr || !t.key_set().has(c10::DispatchKey::Python)) return false;
  const py::gil_scoped_acquire gil;
  return Py_TYPE(py::reinterpret_steal<py::object>(THPVariable_Wrap(t)).ptr()) == fakes().type;
}
inline std::shared_ptr<py::object> mode_of_fake(const Tensor& t) {
  static auto* const last = new std::weak_ptr<py::object>();
  const py::gil_scoped_acquire gil;
  py::object mode = py::getattr(py::reinterpret_steal<py::object>(THPVariable_Wrap(t)), "fake_mode");
  auto known = last->lock();
  if (!known || !known->is(mode)) *last = known = of_python(std::move(mode));
  return known;
}
inline Tensor fake_of(const py::object& mode, const Tensor& meta, c10::Device device) {
  const py::gil_scoped_acquire gil;
  return py::cast<Tensor>(fakes().make(mode, meta, device.str()));
}

// Sets the mode, outside of which a backward pass may run; false if it is set already.
inline bool sets_mode_of_fakes(const py::object& mode) {
  using Modes = c10::impl::TorchDispatchModeTLS;
  constexpr auto key = c10::impl::TorchDispatchModeKey::FAKE;
  if (Modes::get_mode(key).has_value()) return false;
  const py::gil_scoped_acquire gil;
  Modes::set_mode(std::make_shared<c10::impl::PyObject_TorchDispatchMode>(py::object(mode).release().ptr(), getPyInterpreter()), key);
  return true;
}

// Whether the host can read the tensor's memory.
inline bool is_on_host(const Tensor& t) {
  return t.key_set().has(c10::DispatchKey::CPU) && !t.key_set().has(c10::DispatchKey::Python);
}

// Calls in its scope bypass the active modes.
class PastModes {
  const c10::impl::ExcludeDispatchKeyGuard without_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// Whether modes are active that choose what a call returns. The log has their own calls. Fake tensors' mode computes nothing.
inline bool are_modes() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  if (!Modes::any_modes_set()) return false;
  return Modes::stack_len() > (Modes::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value() ? 1 : 0);
}

}  // namespace leannorm::recording

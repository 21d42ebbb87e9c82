"""The bridge from CuTe DSL to the simulator: `sim.device`. Optional; alone here, torch and cutlass.

How a call flows
----------------
    with sim.device("sm_100a", on_launch=callback):
        flash_attn_fwd(q, k, v)          # any CuTe-DSL program, CPU tensors

1. The program asks torch where it is. `torch_cuda.py` answers: on `cuda:0`, compute capability
   10.0, few SMs. A torch function mode answers for tensors; `torch.cuda.*` is replaced.
2. The program compiles. Tensors enter CuTe DSL through DLPack, whose device says CUDA
   (`dlpack.py`), so the code is that of a GPU, with global pointers. `dsl.py` has the compiler
   write the PTX and the cubin into a folder of ours, and remembers the pair under the cubin's hash,
   since kernels' names repeat.
3. Before the host module becomes machine code, `splice.py` gives each CUDA runtime function that
   it declares a body: a jump to a ctypes callback. So the host code runs for real, natively,
   against a runtime in Python (`runtime.py`); no compiler, no CUDA toolkit and no library to be
   found by the loader is involved. What that runtime lacks fails by its name when it is called.
4. The host code loads its cubin (the hash finds the PTX) and launches. The runtime reads the
   launch's configuration and, by the PTX's parameter list, the arguments; `arguments.py` adds the
   memory that is known to exist: the storages of the tensors in the call, then of tensors whose
   address was asked for. The callback gets all of it as a `CapturedLaunch`, before the launching
   call returns.
5. A callback's exception cannot pass through native code. It is kept, an error code is returned in
   its place, and the replaced ways into a compiled function raise it.

What is patched, and why
------------------------
- `torch.cuda` functions and tensor operations: no driver is there to answer.
- `Compiler.compile`: steps 2 and 3.
- `cute.runtime._Tensor.__init__` and the calls through TVM FFI: CPU tensors claim CUDA.
- `BaseDSL._func`, `JitExecutor.__call__`, compiled functions' `__call__`: names, buffers, step 5.
- `HardwareInfo`, `num_devices`, `_load_cuda_library`: a driver would be asked.
- `CUTE_DSL_ARCH` and the variables that override it; `jit_cache`, `disable_file_caching`,
  flash-attn-4's `compile_cache` attributes, the `lru_cache`s of flash-attn-4 and quack: simulated
  code holds addresses of this process and the SM count of a device that does not exist. It must
  never meet real code, in memory or on disk; exporting it is refused. What is to be kept on disk
  for simulation is compiled without step 3 and linked with a table of addresses (`aot.py`).

All of it is undone on exit, in reverse order, also after an error.

Limits: one device, one thread, not re-entrant. A function mode is a thread's own, so autograd's
backward pass does not see the device: call backward functions directly. `torch.Generator` is no
function of tensors: `device="cuda"` fails there. Operators registered for CUDA alone are not found
by the dispatcher, which sees CPU tensors. Events have no times; CUDA graphs, managed memory and
`cuTensorMapEncodeTiled` are not there.
"""

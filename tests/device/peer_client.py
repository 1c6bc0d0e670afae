"""The client for other runtimes, `peer_client.py litert|onnx FILE INPUTS OUTPUTS`: as client.cpp.

It runs in the Python that set_up.sh made, beside the runtimes and numpy.
"""

import ctypes
import re
import struct
import sys
from pathlib import Path

import numpy

COUNTER_CALL = 6847  # as in clock.h
# PyTorch's numbers of scalar types.
TYPES = {0: "uint8", 1: "int8", 3: "int32", 4: "int64", 6: "float32", 11: "bool"}


def instructions():
    """Return how many instructions the process has executed."""
    now = ctypes.c_uint64()
    _LIBRARY.syscall(ctypes.c_long(COUNTER_CALL), ctypes.byref(now))
    return now.value


_LIBRARY = ctypes.CDLL(None)


def read_arrays(content):
    """Return the arrays of a file."""
    at, arrays = 0, []
    while at < len(content):
        number, rank = struct.unpack_from("2i", content, at)
        shape = struct.unpack_from(f"{rank}i", content, at + 8)
        at += 8 + 8 * rank  # sizes, and the order of dimensions: the usual one
        kind = numpy.dtype(TYPES[number])
        size = int(numpy.prod(shape, dtype=int))
        arrays.append(numpy.frombuffer(content, kind, size, at).reshape(shape))
        at += size * kind.itemsize
    return arrays


def write_arrays(path, arrays):
    """Write arrays to a file."""
    numbers = {name: number for number, name in TYPES.items()}
    with open(path, "wb") as file:
        for one in arrays:
            order = range(one.ndim)
            file.write(struct.pack(f"{2 + 2 * one.ndim}i", numbers[one.dtype.name], one.ndim, *one.shape, *order))
            file.write(one.tobytes())


def open_litert(path, arrays, threads=1):
    """Return what calls a file of LiteRT, with its XNNPACK, and what returns the outputs in the model's order."""
    from ai_edge_litert.interpreter import Interpreter

    model = Interpreter(model_path=str(path), num_threads=threads)
    model.allocate_tensors()

    def place(detail):  # names such as serving_default_args_3:0 and serving_default_output_2_output say it
        return int(re.search(r"(?:args|output)_(\d+)", detail["name"]).group(1))

    inputs, outputs = sorted(model.get_input_details(), key=place), sorted(model.get_output_details(), key=place)
    for detail, array in zip(inputs, arrays, strict=True):
        model.set_tensor(detail["index"], array.astype(detail["dtype"]))  # the converter narrows integers
    return model.invoke, lambda: [model.get_tensor(one["index"]) for one in outputs]


def open_onnx(path, arrays, threads=1):
    """Return what calls a file of ONNX Runtime, and what returns the outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # its threads do not disturb who is next
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = dict(zip((one.name for one in session.get_inputs()), arrays, strict=True))
    made = []

    def call():
        made[:] = session.run(None, feeds)

    return call, lambda: made


OPEN = {"litert": open_litert, "onnx": open_onnx}


def main(kind, path, inputs, outputs):
    """Call a model twice and print the instructions of each call."""
    arrays = read_arrays(Path(inputs).read_bytes())
    call, results = OPEN[kind](path, arrays)
    for _ in range(2):
        start = instructions()
        call()
        print("call", instructions() - start, flush=True)
    write_arrays(outputs, results())


if __name__ == "__main__":
    main(*sys.argv[1:])

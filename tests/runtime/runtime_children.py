"""What the tests of both engines do in processes of their own."""

import os

import forked
from folders import IMPORTED


def run(code, *arguments, env=None, **options):
    paths = os.pathsep.join([IMPORTED, os.environ.get("PYTHONPATH", "")])
    return forked.run(code, *arguments, env={"PYTHONPATH": paths, **(env or {})}, **options)


# Runs in a process of its own, which must live to the end: each damaged file ends in a result or in a LoweringError.
# Without the digests, which would refuse each of them before its content is looked at.
DAMAGE = """
import random, sys, torch
from exir_lowering import LoweringError, load
content = open(sys.argv[1], "rb").read()
tables = int.from_bytes(content[16:24], "little")
chance = random.Random(0)
inputs = {"forward": torch.ones(2, 3, 8, 8), "count": torch.ones(3)}

def attempt(damaged):
    try:
        program = load(bytes(damaged), verify=False)
        for name in program.method_names:
            if name in inputs:
                program.run(name, inputs[name])
    except LoweringError as error:
        return len(str(error)) > 40
    return False

def truncated():
    ends = {tables - 1, tables, tables + 1, len(content) - 1}
    for length in sorted(ends | set(range(64)) | set(range(0, len(content), 97))):
        yield content[:length]

def random_bytes():
    for _ in range(60):
        noise = chance.randbytes(chance.randrange(3000))
        yield noise
        yield content[:8] + noise
        yield content[:tables] + noise
        yield content[:48] + noise + content[48 + len(noise):]

def header():
    for at in range(48):
        for bit in range(0, 8, 3):
            damaged = bytearray(content)
            damaged[at] ^= 1 << bit
            yield damaged

def flipped():
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 1, 2, 8])):
            damaged[chance.randrange(tables)] ^= chance.randrange(1, 256)
        yield damaged

for what, files in ("truncated", truncated()), ("random", random_bytes()), ("header", header()), ("flipped", flipped()):
    results = [attempt(file) for file in files]
    print(f"{what}:{sum(results)}/{len(results)}")
"""


# In a header, padding and the length of the header may be anything; in the tables, so may sizes and numbers.
LEAST_REFUSED = {"truncated": 1.0, "random": 0.6, "header": 0.2, "flipped": 0.5}


EXIT = """
import atexit, sys, threading, time, torch
from scripted import ScriptDelegate
from exir_lowering import load

class Loud(ScriptDelegate):
    def destroy(self, handle):
        print("destroyed", flush=True)

def thread():
    # torch itself ends the process when a thread makes or lets go of a tensor of its own while Python exits.
    x, kept = torch.ones(2, 3), []
    def work():
        while True:
            kept.append(program.run("forward", x, x))
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)

def raise_in_atexit():
    atexit.register(lambda: program.run("forward", torch.ones(2, 3), torch.ones(2, 3)))

program = load("model.pte", delegates=[Loud])
other = load("model.pte", delegates=[Loud])
cycle = [program]
cycle.append(cycle)
program.run("forward", torch.ones(2, 3), torch.ones(2, 3))
ENDING
"""

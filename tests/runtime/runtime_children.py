"""What tests of the runtime do in processes of their own."""

import os

import forked
from folders import IMPORTED


def run(code, *arguments, env=None, **options):
    paths = os.pathsep.join([IMPORTED, os.environ.get("PYTHONPATH", "")])
    return forked.run(code, *arguments, env={"PYTHONPATH": paths, **(env or {})}, **options)


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

"""Delegates for programs with limits: they run in another process, which finds their classes here."""

import os
import signal
import warnings

from scripted import ScriptDelegate

from exir_lowering import Delegate


class Failing(ScriptDelegate):
    def execute(self, handle, inputs):
        raise ValueError("out of order")


class Dying(ScriptDelegate):
    """Ends its process at the second run."""

    def execute(self, handle, inputs):
        outputs = super().execute(handle, inputs)
        if self.executed == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return outputs


class Warning_(ScriptDelegate):
    def execute(self, handle, inputs):
        warnings.warn("the device is warm", RuntimeWarning, stacklevel=1)
        return super().execute(handle, inputs)


class Thrice(Delegate):
    """Stands for a library that doubles, so that it is seen which of them executes a file."""

    delegate_id = "twice"

    def compile(self, processed, compile_specs, context):
        return self

    def execute(self, handle, inputs):
        return [inputs[0] * 3]

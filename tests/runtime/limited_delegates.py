"""Delegates for programs with limits: they run in another process, which finds their classes here."""

import os
import signal
import warnings

from scripted import ScriptDelegate


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

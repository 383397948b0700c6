"""Has ``headgate run`` start its workers as plain child processes instead of Spark's, in processes that a test starts.

Python imports this module by itself at start, because the test puts its directory on PYTHONPATH. Everything else is the
product's own: the command line, the supervisor, the standby, the driver, the workers, the storage, the signals.
"""

import importlib.util
import sys

SESSION, JVM, COMMANDS = "headgate.spark.session", "headgate.spark.jvm", "headgate.cli.command_line"

begun = []
"""The process that workers are forked from, until a run uses it."""


class Finder:
    """Replaces names of three modules as soon as they are imported: no context is made, and no JVM begun ahead."""

    def __init__(self):
        self._wanted = {SESSION: without_session, JVM: without_jvm, COMMANDS: with_zygote}

    def find_spec(self, name, path=None, target=None):
        if name == "pandas":  # as where it is not installed: half a second for what nothing here needs
            raise ModuleNotFoundError("No module named 'pandas'", name=name)
        replace = self._wanted.pop(name, None)
        if replace is None:
            return None
        spec = importlib.util.find_spec(name)
        original = spec.loader.exec_module

        def exec_module(module):
            original(module)
            replace(module)

        spec.loader.exec_module = exec_module
        return spec


def without_session(module):
    module.start_pipeline = lambda definition, **options: start(module, definition, **options)
    module.check_cluster = lambda *_: None
    module.WarmContext = Nothing


def with_zygote(module):
    call = module.call

    def called(app):
        if sys.argv[1:2] == ["run"] and "--supervised" not in sys.argv:  # which leaves the run to another process
            begin_zygote()
        call(app)

    module.call = called


def begin_zygote():
    """Fork what workers are forked from: after all imports, which it would repeat, and before any thread begins."""
    from tests.runtime.launching import ForkedZygote

    begun.append(ForkedZygote())


def without_jvm(module):
    module.start_early = lambda launch: None


class Nothing:
    """A context that is not needed."""

    spark = None
    is_alive = True

    def __init__(self, *given):
        pass

    def close(self):
        pass


def start(module, definition, *, observer=None, **_):
    from tests.runtime.launching import FINGERPRINT, ProcessLauncher, Zygote

    from headgate.runtime.driver.driver import Driver, lock_for

    lock = lock_for(definition.config)
    zygote = Zygote(process=begun.pop() if begun else None)
    driver = Driver(definition, ProcessLauncher(zygote, definition), observer, FINGERPRINT, lock=lock, beats=True)
    driver.start()
    return module.SparkHandle(driver)


sys.meta_path.insert(0, Finder())

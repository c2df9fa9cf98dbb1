"""Run mutated copies of tilewise, each in a forked child. Started by path, never imported: its process has not seen tilewise.

stdin: one JSON object, ``{"folder": ..., "jobs": ..., "tasks": [...]}``. A task is ``{"id", "root", "runs", "stop"}``: import
tilewise from ``root`` and judge it on the ``[backend, entry]`` pairs of ``runs``, up to the first failure if ``stop``. ``runs`` of
None means: write the yardsticks of all entries into ``folder``. What is right comes from that one file for each entry, made by
the package as it is: a mutant that changes the oracle too is not judged by itself. stdout: one JSON line for each task, as they
end.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings

import torch

os.environ["TRITON_INTERPRET"] = "1"
TIME_LIMIT = 120.0  # seconds for one task


def work(task, folder):
    """What is wrong: a list of ``[backend, entry, output, why]``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    sys.path.insert(0, task["root"])
    import tilewise

    if not tilewise.__file__.startswith(task["root"]):
        raise ImportError(f"tilewise came from {tilewise.__file__}, expected {task['root']}")
    from tilewise.testing import gauntlet, second, tangents
    from tilewise.testing.interpreter import quicken

    quicken()

    if task["runs"] is None:
        from tilewise.testing.tolerance import Yardstick

        for entry in gauntlet.GAUNTLET:
            if not entry.gpu_gib:
                torch.save(Yardstick(entry.build()), f"{folder}/{entry.name}.pt")
        for entry in tangents.JVP_ENTRIES:
            call = entry.build()
            torch.save(tangents.JvpYardstick(call, tangents.draw_tangents(call)), f"{folder}/{entry.name}.jvp.pt")
        for entry in second.SECOND_ENTRIES:
            call = second.second_call(entry)
            torch.save(second.SecondYardstick(call, tangents.draw_tangents(call)), f"{folder}/{entry.name}.second.pt")
        gauntlet.run(gauntlet.entry("one_key"), "triton")
        names = [name for name in sys.modules if name.split(".")[0] not in ("tilewise", "__main__")]
        with open(f"{folder}/modules.json", "w") as out:
            json.dump(names, out)
        return []
    from tilewise.backends import torch_second, torch_tiles
    from tilewise.testing.calls import evaluate
    from tilewise.testing.mutants import split_and_merge
    from tilewise.testing.poison import poison

    # The sizes of real work would hold a whole entry in one tile.
    torch_tiles.BLOCK_M, torch_tiles.BLOCK_N = 64, 32
    torch_second._ELEMENTS["cpu"] = 1 << 13
    failed = []
    for backend, name in task["runs"]:
        mode, _, of = backend.rpartition(" ")
        yardstick = torch.load(f"{folder}/{name}{'.' if mode else ''}{mode}.pt", weights_only=False)
        if yardstick.call.spec.function is not None:
            gauntlet.entry(name).build()  # its function must be known here, too
        try:
            with poison():
                if mode:
                    along = tangents.evaluate_jvp if mode == "jvp" else second.evaluate_second
                    got = along(yardstick.call, yardstick.tangents, of)
                else:
                    got = evaluate(yardstick.call, split_and_merge if backend == "merge" else backend)
        except Exception as error:
            failed.append([backend, name, "error", f"{type(error).__name__}: {error}"])
        else:
            failed += [[backend, name, r.output, r.where] for r in yardstick.judge(got, name) if not r.ok]
        if failed and task["stop"]:
            break
    return failed


def child(task, folder, write):
    """The forked child: never returns."""
    try:
        answer = {"failed": work(task, folder)}
    except BaseException:
        answer = {"broken": traceback.format_exc()}
    with os.fdopen(write, "w") as out:
        json.dump(answer, out)
    os._exit(0)


def main():
    wanted = json.load(sys.stdin)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # What tilewise imports from elsewhere is imported before the forks, so that no child pays for it.
    if os.path.exists(f"{wanted['folder']}/modules.json"):
        with open(f"{wanted['folder']}/modules.json") as names:
            for name in json.load(names):
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
    waiting, running = list(wanted["tasks"]), {}
    while waiting or running:
        while waiting and len(running) < wanted["jobs"]:
            task = waiting.pop(0)
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                child(task, wanted["folder"], write)
            os.close(write)
            running[read] = [task, pid, time.monotonic(), b""]
        for read in select.select(list(running), [], [], 1.0)[0]:
            data = os.read(read, 65536)
            running[read][3] += data
            if data:
                continue
            task, pid, _, text = running.pop(read)
            os.close(read)
            _, status = os.waitpid(pid, 0)
            # A child that died wrote nothing: the kernel left its memory, or ran past the time.
            answer = json.loads(text) if text else {"died": status}
            print(json.dumps({"id": task["id"], **answer}), flush=True)
        for _, pid, started, _ in running.values():
            if time.monotonic() - started > TIME_LIMIT:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()

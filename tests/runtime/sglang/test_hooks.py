"""Each hook against the sources and the real hook registry of every supported release of SGLang."""

import ast
import functools
import logging
import multiprocessing
import subprocess
import sys
import types

import pytest

from kvcq.errors import MismatchError
from kvcq.runtime.sglang.hooks import HOOKS, end_process, hooks, register, verify
from tests.runtime.sglang.wheels import VERSIONS, Sources

# One release of each way of building pools.
EITHER = (VERSIONS[0], VERSIONS[-1])
pytestmark = pytest.mark.network
REGISTRY = "sglang.srt.plugins.hook_registry"


def functions():
    """kvcq's functions, each leaving a mark on what the target returns."""
    return {
        "refuse": lambda result, self: None,
        "size": lambda original, runner: ("sized", original(runner)),
        "pool": lambda original, self, **given: ("pooled", original(self, **given)),
        "match_cap": lambda original, self, input_len: min(original(self, input_len), 5),
        "sink_bind": lambda result, self, reqs: ("bound", result),
        "sink_unpin": lambda self, req: None,
        "sink_clear": lambda result, self: None,
        "report": lambda result, self, recv_req: ("told", result),
        "weights_disk": lambda original, self, recv_req: (False, "no"),
        "weights_tensor": lambda original, self, recv_req: (False, "no"),
        "weights_distributed": lambda original, self, recv_req: (False, "no"),
        "weights_ipc": lambda original, self, recv_req: (False, "no"),
    }


@functools.cache
def registry_code(version):
    return compile(Sources(version).text(REGISTRY), REGISTRY, "exec")


def stand_in(monkeypatch, sources):
    """Put a module tree in place of SGLang: its real registry, and every target with its real parameters."""
    foreign = {id(module) for module in sys.modules.values()}

    class Few:
        """What the registry sees of `sys`: thousands of modules that are older than a target hold no name of it."""

        @property
        def modules(self):
            return {name: module for name, module in sys.modules.items() if id(module) not in foreign}

    def module(name):
        if name not in sys.modules or not hasattr(sys.modules[name], "stand_in"):
            made = types.ModuleType(name)
            made.stand_in, made.__path__ = True, []
            monkeypatch.setitem(sys.modules, name, made)
            if parent := name.rpartition(".")[0]:
                setattr(module(parent), name.rpartition(".")[2], made)
        return sys.modules[name]

    registry = module(REGISTRY)
    exec(registry_code(sources.version), registry.__dict__)  # noqa: S102
    registry.sys = Few()
    for hook in hooks(sources.version):
        parts = hook.target.split(".")
        cut = next(n for n in range(len(parts) - 1, 0, -1) if sources.has(".".join(parts[:n])))
        owner = module(".".join(parts[:cut]))
        for name in parts[cut:-1]:
            if not hasattr(owner, name):
                setattr(owner, name, type(name, (), {}))
            owner = getattr(owner, name)
        real = sources.function(hook.target)
        for argument in ast.walk(real.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        plain = f"def {parts[-1]}({ast.unparse(real.args)}): return 'plain'"
        scope = {}
        exec(plain, scope)  # noqa: S102
        setattr(owner, parts[-1], scope[parts[-1]])
    return registry


def resolve(target):
    module, _, name = target.rpartition(".")
    if module in sys.modules:
        return sys.modules[module], name
    owner, owner_name = resolve(module)
    return getattr(owner, owner_name), name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_release_has_one_hook_of_each_name(version):
    names = [hook.name for hook in hooks(version)]
    assert sorted(names) == sorted({hook.name for hook in HOOKS})


def test_a_release_outside_the_window_has_no_hooks():
    with pytest.raises(MismatchError):
        hooks("0.5.18")


def test_each_target_is_a_function_with_the_parameters_that_are_relied_on(sources):
    for hook in hooks(sources.version):
        parameters = sources.parameters(hook.target)
        assert parameters[: len(hook.parameters)] == list(hook.parameters), hook.target


def test_no_target_is_decorated_so_that_a_wrapper_replaces_all_of_it(sources):
    for hook in hooks(sources.version):
        assert not sources.function(hook.target).decorator_list, hook.target


def test_kinds_are_those_of_the_registry(sources):
    body = sources.find(f"{REGISTRY}.HookType").body
    kinds = {node.value.value for node in body if isinstance(node, ast.Assign)}
    assert {hook.kind for hook in HOOKS} <= kinds
    assert sources.parameters(f"{REGISTRY}.HookRegistry.register")[:4] == ["cls", "target", "hook", "hook_type"]


def test_plugins_load_before_arguments_are_parsed_and_first_thing_in_a_scheduler(sources):
    text = sources.text("sglang.launch_server")
    assert 0 < text.index("    load_plugins()") < text.index("    server_args = prepare_server_args")
    scheduler = sources.function("sglang.srt.managers.scheduler.run_scheduler_process")
    first = next(node for node in scheduler.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    assert ast.unparse(first) == "load_plugins()"


def test_the_entry_point_group_is_the_one_that_is_loaded(sources):
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in sources.text("sglang.srt.plugins.__init__")


def test_refusals_come_before_any_process_is_started(sources):
    launch = ast.unparse(sources.find("sglang.srt.entrypoints.engine.Engine._launch_subprocesses"))
    order = ["load_plugins()", "server_args.check_server_args()", "cls._launch_scheduler_processes("]
    places = [launch.index(call) for call in order]
    assert places == sorted(places)


def test_the_configurator_is_made_by_the_hooked_factory_only(sources):
    old = "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._resolve_memory_pool_config"
    new = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_memory_pool_config"
    target = old if hooks(sources.version)[1].parameters == ("mr",) else new
    made = sources.calls(target, "create_memory_pool_configurator") or sources.calls(target, "config_from_budget")
    assert made, "the pool is sized by something else"


def test_the_pool_class_goes_through_the_hooked_function(sources):
    target = next(hook.target for hook in hooks(sources.version) if hook.name == "pool")
    body = sources.function(target)
    if target.endswith("_init_pools"):
        # The class is looked up in its module when the function runs, so that a swapped name is what is built.
        module = sources.tree(target.rpartition(".")[0].rpartition(".")[0])
        imported = {item.name for node in module.body if isinstance(node, ast.ImportFrom) for item in node.names}
        assert "MHATokenToKVPool" in imported
        assert any(isinstance(node, ast.Name) and node.id == "MHATokenToKVPool" for node in ast.walk(body))
    else:
        calls = sources.calls(target.rpartition(".")[0], "_build_mha_kv_pool")
        assert calls and all("mha_pool_class" in {word.arg for word in call.keywords} for call in calls)
        assert not body.args.posonlyargs and [argument.arg for argument in body.args.args] == ["self"]


def test_admission_matches_a_prefix_no_longer_than_the_hooked_limit(sources):
    assert sources.calls("sglang.srt.managers.schedule_batch.Req.init_next_round_input", "_compute_max_prefix_len")


def test_slots_of_requests_are_given_and_taken_by_the_hooked_functions(sources):
    pool = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
    touching = {
        name
        for name in ("alloc", "free", "write", "available_size", "clear")
        if "free_slots" in ast.unparse(sources.find(f"{pool}.{name}"))
    }
    assert touching == {"alloc", "free", "available_size", "clear"}


def test_the_state_of_a_scheduler_is_asked_through_the_hooked_function(sources):
    text = sources.text("sglang.srt.managers.scheduler")
    assert "(GetInternalStateReq, self.get_internal_state)" in text
    returned = sources.calls("sglang.srt.managers.scheduler.Scheduler.get_internal_state", "GetInternalStateReqOutput")
    assert [word.arg for call in returned for word in call.keywords] == ["internal_state"]


def test_weights_are_replaced_through_the_hooked_functions_only(sources):
    held = {hook.target.rpartition(".")[2] for hook in hooks(sources.version) if hook.name.startswith("weights_")}
    worker = sources.tree("sglang.srt.managers.tp_worker")
    defined = [
        node.name
        for node in ast.walk(worker)
        if isinstance(node, ast.FunctionDef) and "update_weights_from" in node.name
    ]
    assert sorted(defined) == sorted(held)
    # What the scheduler does with the answer: (False, why) loads nothing and is told.
    updater = sources.text("sglang.srt.managers.scheduler_components.weight_updater")
    for name in held:
        assert f"success, message = self.tp_worker.{name}(recv_req)" in updater or f"worker.{name}(recv_req)" in updater
    assert "self.weight_updater" in sources.text("sglang.srt.managers.scheduler")


def test_row_and_page_zero_are_nobodys(sources):
    pool = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
    assert "list(range(1, self._alloc_size))" in ast.unparse(sources.find(f"{pool}.clear"))
    assert "self._alloc_size = size + 1" in ast.unparse(sources.find(f"{pool}.__init__"))


def test_models_write_into_a_pool_themselves_only_if_it_is_bfloat16(sources):
    body = ast.unparse(sources.find("sglang.srt.models.utils.enable_fused_set_kv_buffer"))
    assert "_is_cuda and pool.dtype == torch.bfloat16" in body


def test_the_names_of_backends_are_open(sources):
    assert sources.parameters("sglang.srt.server_args.add_attention_backend_choices") == ["choices"]
    registry = "sglang.srt.layers.attention.attention_registry.register_attention_backend"
    assert sources.parameters(registry) == ["name"]


def test_a_pool_exists_before_the_backend_that_reads_it(sources):
    old = sources.text("sglang.srt.model_executor.model_runner")
    new = sources.text("sglang.srt.managers.scheduler")
    # Since 0.5.14 the scheduler asks for both; before, the runner made them one after the other.
    in_new = [new.find(f"self.tp_worker.{call}()") for call in ("alloc_memory_pool", "init_attention_backends")]
    in_old = [old.find(f"self.{call}(") for call in ("init_memory_pool", "init_attention_backend")]
    first, second = in_new if max(in_new) > 0 else in_old
    assert 0 < first < second


def test_a_registered_hook_is_verified_and_changes_what_the_target_returns(sources, monkeypatch):
    registry = stand_in(monkeypatch, sources)
    ours = functions()
    register(registry.HookRegistry, registry.HookType, ours, sources.version)
    with pytest.raises(MismatchError, match=r"did not apply"):
        verify(registry.HookRegistry, ours, sources.version)
    registry.HookRegistry.apply_hooks()
    verify(registry.HookRegistry, ours, sources.version)
    pool = sys.modules["sglang.srt.mem_cache.memory_pool"].ReqToTokenPool
    assert pool().alloc([]) == ("bound", "plain")
    assert pool().free(None) == "plain"


def test_an_import_made_before_the_hook_is_hooked_too(monkeypatch):
    sources = Sources(VERSIONS[-1])
    registry = stand_in(monkeypatch, sources)
    factory = sys.modules["sglang.srt.model_executor.pool_configurator"].create_memory_pool_configurator
    importer = types.ModuleType("importer")
    importer.create_memory_pool_configurator = factory
    monkeypatch.setitem(sys.modules, "importer", importer)
    register(registry.HookRegistry, registry.HookType, functions(), sources.version)
    registry.HookRegistry.apply_hooks()
    assert importer.create_memory_pool_configurator(None) == ("sized", "plain")


@pytest.mark.parametrize("name", sorted({hook.name for hook in HOOKS}))
@pytest.mark.parametrize("sabotage", ["gone", "unhooked", "replaced", "other", "parameter", "forgotten"])
@pytest.mark.parametrize("version", EITHER)
def test_a_missing_hook_is_found_whatever_took_it(name, sabotage, version, monkeypatch, caplog):
    sources = Sources(version)
    registry = stand_in(monkeypatch, sources)
    hook = next(hook for hook in hooks(sources.version) if hook.name == name)
    owner, attribute = resolve(hook.target)
    plain = getattr(owner, attribute)
    if sabotage == "gone":
        # SGLang only logs that it cannot hook what is not there.
        delattr(owner, attribute)
        caplog.set_level(logging.CRITICAL)
    if sabotage == "parameter":
        setattr(owner, attribute, lambda *given: "plain")
    ours = functions()
    registered = {**ours, name: lambda *given: None} if sabotage == "other" else ours
    register(registry.HookRegistry, registry.HookType, registered, sources.version)
    if sabotage == "forgotten":
        del registry.HookRegistry._hooks[hook.target]
    registry.HookRegistry.apply_hooks()
    if sabotage == "unhooked":
        setattr(owner, attribute, plain)
    if sabotage == "replaced":
        setattr(owner, attribute, lambda *given, **named: "something else")
    with pytest.raises(MismatchError) as caught:
        verify(registry.HookRegistry, ours, sources.version)
    assert caught.value.exit_code == 5 and caught.value.where == hook.target
    line = str(caught.value)
    assert f"hook {name} of SGLang {sources.version}" in line and hook.why in line and "--engine hf" in line
    assert "\n" not in line


def test_nothing_is_registered_where_a_function_is_missing(monkeypatch):
    registry = stand_in(monkeypatch, Sources(VERSIONS[-1]))
    ours = functions()
    del ours["sink_unpin"]
    with pytest.raises(KeyError):
        register(registry.HookRegistry, registry.HookType, ours, VERSIONS[-1])
    assert not registry.HookRegistry._hooks


def test_another_plugin_around_the_same_target_does_not_hide_ours(monkeypatch):
    sources = Sources(VERSIONS[-1])
    registry = stand_in(monkeypatch, sources)
    ours = functions()
    register(registry.HookRegistry, registry.HookType, ours, sources.version)
    target = "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len"
    registry.HookRegistry.register(target, lambda original, *given: original(*given), registry.HookType.AROUND)
    registry.HookRegistry.apply_hooks()
    verify(registry.HookRegistry, ours, sources.version)


def test_a_launcher_gets_the_exit_code_and_one_line(capsys):
    with pytest.raises(SystemExit) as caught:
        end_process(MismatchError("no hook", where="here", fix="do this"))
    assert caught.value.code == 5
    assert capsys.readouterr().err == "error: no hook (here): do this\n"


def _scheduler():
    try:
        end_process(MismatchError("no hook", where="here", fix="do this"))
    finally:
        print("still alive")  # a scheduler's own handlers must not run


def test_a_scheduler_ends_at_once_with_the_exit_code():
    code = (
        "import multiprocessing as mp\n"
        "from tests.runtime.sglang.test_hooks import _scheduler\n"
        "if __name__ == '__main__':\n"
        "    child = mp.get_context('fork').Process(target=_scheduler)\n"
        "    child.start(); child.join(); raise SystemExit(child.exitcode)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (5, "error: no hook (here): do this\n", "")
    assert multiprocessing.parent_process() is None

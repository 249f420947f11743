"""Who holds the GPU, how much is free, where an engine's weights are: laid trees and canned tool output."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import llmguard as guard

CASES = Path(__file__).resolve().parent / "cases"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HZ = os.sysconf("SC_CLK_TCK")
NVIDIA = {"sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n", "sys/bus/pci/devices/0000:01:00.0/class": "0x030000\n"}
CARD = "0000:03:00.0"


def case(name):
    return json.loads((CASES / name).read_text())


def lay(root, tree):
    """Files by their path; what stands in an fd folder becomes the link that it is in /proc."""
    for path, text in tree.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent.name == "fd" or target.name == "driver":
            target.symlink_to(text)
        else:
            target.write_text(text)
    (root / "proc").mkdir(exist_ok=True)
    return guard.Box(str(root))


def process(pid, comm, *, start=1000, state="S", session=1, flags=0):
    words = [state, 1, 1, session, 0, -1, flags, *[0] * 12, start, *[0] * 30]
    return {
        "proc/%d/comm" % pid: comm + "\n",
        "proc/%d/stat" % pid: "%d (%s) %s\n" % (pid, comm, " ".join(map(str, words))),
    }


class Tool:
    """A stand-in for run_tool: the answer by a word of the command line, and which commands came."""

    def __init__(self, xml=(0, "", ""), cards=(1, "", ""), apps=(1, "", "")):
        self.answers = {"-x": xml, "--query-gpu": cards, "--query-compute-apps": apps}
        self.calls = []

    def __call__(self, argv, seconds):
        assert argv[0] == "nvidia-smi" and seconds > 0
        self.calls.append(argv[1:])
        return next(answer for word, answer in self.answers.items() if any(arg.startswith(word) for arg in argv))


def no_tool(argv, seconds):
    return None, "", "nvidia-smi: not found"


def by_pid(reading):
    sums = {}
    for row in reading.processes:
        sums[row.pid] = None if row.bytes is None or sums.get(row.pid, 0) is None else sums.get(row.pid, 0) + row.bytes
    return sums


def xml(*cards, count=None):
    count = len(cards) if count is None else count
    return '<?xml version="1.0" ?>\n<nvidia_smi_log><attached_gpus>%s</attached_gpus>%s</nvidia_smi_log>\n' % (
        count,
        "".join(cards),
    )


def card(uuid="GPU-a", total="24576 MiB", used="200 MiB", free="24376 MiB", rows=(), processes=None):
    infos = "".join(
        "<process_info><pid>%s</pid><type>C</type><process_name>%s</process_name><used_memory>%s</used_memory></process_info>"
        % row
        for row in rows
    )
    return (
        "<gpu id='00000000:01:00.0'><product_name>X</product_name><uuid>%s</uuid><fb_memory_usage><total>%s</total><used>%s</used>"
        "<free>%s</free></fb_memory_usage><processes>%s</processes></gpu>"
        % (uuid, total, used, free, infos if processes is None else processes)
    )


# ----- no GPU, and a GPU that can't be read


def test_a_box_without_a_gpu_is_a_fact_and_no_error(tmp_path):
    box = lay(
        tmp_path,
        {"sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086\n", "sys/bus/pci/devices/0000:00:1f.0/class": "0x060100\n"},
    )
    reading = guard.read_gpus(box, no_tool)
    assert reading == guard.GpuReading()
    assert guard.gpu_owners(reading) == []
    assert guard.vram_free(reading, 8 * GIB) is None
    assert guard.evidence_of(box, reading, []).meant_for_cpu == "no GPU"


@pytest.mark.parametrize("given_", case("gpu-nvidia-smi-fails.json"), ids=lambda each: each["box"])
def test_a_tool_that_fails_is_unknown_and_an_owner(tmp_path, given_):
    box = lay(tmp_path, NVIDIA if given_["pci_10de"] else {})
    answer = given_["rc"], given_["stdout"], given_["stderr"]
    reading = guard.read_gpus(box, lambda argv, seconds: answer)
    if given_["expect"] == "no GPU":
        assert reading == guard.GpuReading()
        return
    said = (given_["stdout"] + "\n" + given_["stderr"]).splitlines() + ["can't be run"]
    first = next(line for line in said if line and line[0] not in "<\t")
    assert first in reading.problem and not reading.devices
    assert [owner.kind for owner in guard.gpu_owners(reading, unexplained="ignore", ignore=["x"])] == ["unknown"]
    assert guard.gpu_bytes(reading, {1}) is guard.vram_free(reading, 9 * GIB) is guard.drained(reading, {1}) is None


@pytest.mark.parametrize(
    "text", ["No devices were found\n", "", "<?xml version='1.0'?><nvidia_smi_log>", xml(), xml(card(), count=2)]
)
def test_prose_with_exit_code_0_is_unknown(tmp_path, text):
    assert guard.read_gpus(lay(tmp_path, NVIDIA), Tool((0, text, ""), (0, text, ""), (0, text, ""))).problem


def test_a_missing_or_hung_tool_is_not_called_again(tmp_path):
    box = lay(tmp_path, NVIDIA)
    for answer in ((None, "", "nvidia-smi: not found"), (guard.KILLED, "", "nvidia-smi did not answer in time (10s)")):
        tool = Tool(answer)
        assert answer[2] in guard.read_gpus(box, tool).problem
        assert tool.calls == [["-q", "-x"]]


def test_no_second_tool_is_started_beside_one_that_hangs_in_the_driver(tmp_path):
    tree = {**NVIDIA, "proc/uptime": "5000.10 900.00\n", "proc/stat": "cpu 0\nbtime 1700000000\n"}
    box = lay(tmp_path, {**tree, **process(77, "nvidia-smi", state="D", session=77, start=100 * HZ)})
    tool = Tool()
    assert "pid 77 of 2023-11-14T22:15:00Z" in guard.read_gpus(box, tool).problem
    assert not tool.calls


@pytest.mark.parametrize("change", [{"state": "S"}, {"session": 5}, {"start": 4995 * HZ}])
def test_somebody_elses_or_a_young_nvidia_smi_is_in_nobodys_way(tmp_path, change):
    facts = {"state": "D", "session": 77, "start": 100 * HZ, **change}
    box = lay(tmp_path, {**NVIDIA, "proc/uptime": "5000.10 900.00\n", **process(77, "nvidia-smi", **facts)})
    assert guard.read_gpus(box, Tool((0, xml(card()), ""))).problem is None


def test_a_card_given_to_a_virtual_machine_is_not_this_boxs(tmp_path):
    box = lay(tmp_path, {**NVIDIA, "sys/bus/pci/devices/0000:01:00.0/driver": "../../../bus/pci/drivers/vfio-pci"})
    assert guard.read_gpus(box, no_tool) == guard.GpuReading()


def test_a_tool_that_answers_is_believed_without_a_card_on_the_bus_and_one_that_complains_is_not(tmp_path):
    box = lay(tmp_path, {})
    assert guard.read_gpus(box, Tool((0, xml(card()), ""))).vendor == "nvidia"
    assert guard.read_gpus(box, Tool((9, "NVIDIA-SMI has failed", ""))) == guard.GpuReading()
    assert guard.read_gpus(box, Tool((guard.KILLED, "", "nvidia-smi did not answer in time (10s)"))).problem
    lay(tmp_path, {"dev/nvidiactl": ""})
    assert guard.read_gpus(box, Tool((9, "NVIDIA-SMI has failed", ""))).problem


def test_an_amd_card_without_its_driver_is_unknown(tmp_path):
    box = lay(
        tmp_path,
        {"sys/bus/pci/devices/0000:03:00.0/vendor": "0x1002\n", "sys/bus/pci/devices/0000:03:00.0/class": "0x030000\n"},
    )
    assert "amdgpu" in guard.read_gpus(box, no_tool).problem


# ----- NVIDIA


@pytest.fixture
def desktop(tmp_path):
    """Two cards, one of them in slices; of the processes /proc knows those of the second card."""
    names = {1201: "Xorg", 1377: "gnome-shell", 3100: "firefox", 4242: "llama-server", 7001: "python3"}
    tree = {path: text for pid, comm in names.items() for path, text in process(pid, comm).items()}
    box = lay(tmp_path, {**NVIDIA, **tree, "proc/stat": "btime 1700000000\n"})
    tool = Tool((0, (CASES / "gpu-nvidia-mig-and-desktop.xml").read_text(), ""))
    return box, tool


def test_a_pid_is_summed_over_cards_and_slices_in_one_call(desktop):
    box, tool = desktop
    reading = guard.read_gpus(box, tool)
    assert len(tool.calls) == 1
    assert by_pid(reading) == {1201: 146 * MIB, 1377: 811 * MIB, 3100: None, 4242: 11200 * MIB, 7001: 14542 * MIB}
    assert {row.pid: row.kind for row in reading.processes} == {
        1201: "G",
        1377: "G",
        3100: "C+G",
        4242: "C+G",
        7001: "C",
    }


def test_insufficient_permissions_are_not_reported_totals(desktop):
    sliced, desk = guard.read_gpus(*desktop).devices
    assert (sliced.total, sliced.used, sliced.unified) == (None, None, False)
    assert (desk.index, desk.total, desk.used, desk.name) == (1, 24576 * MIB, 12900 * MIB, "NVIDIA GeForce RTX 3090")


def test_a_card_in_slices_without_totals_is_no_unified_memory(tmp_path):
    text = xml(
        card(total="N/A", used="N/A", free="N/A").replace(
            "<uuid>", "<mig_mode><current_mig>Enabled</current_mig></mig_mode><uuid>"
        )
    )
    reading = guard.read_gpus(lay(tmp_path, NVIDIA), Tool((0, text, "")))
    assert not reading.devices[0].unified and guard.vram_free(reading, 99 * GIB) is None


def test_graphics_processes_are_ignored_by_name_and_not_by_type(desktop):
    reading = guard.read_gpus(*desktop)
    everybody = guard.gpu_owners(reading, owner_min=100 * MIB)
    assert [owner.pid for owner in everybody] == [7001, 4242, 1377, 1201, 3100]
    owners = guard.gpu_owners(reading, {4242}, ignore=["Xorg", "gnome-shell"])
    assert [(owner.pid, owner.bytes) for owner in owners] == [(7001, 14542 * MIB), (3100, None)]
    assert owners[1].text.endswith("uses GPU memory, unknown how much (GPU 1)")
    assert [
        owner.pid for owner in guard.gpu_owners(reading, {4242, 7001}, ignore=["Xorg", "gnome-shell", "firefox"])
    ] == []


def test_only_the_chosen_card_concerns_a_host(desktop):
    second = guard.read_gpus(*desktop, gpus=[1])
    assert by_pid(second)[7001] == 620 * MIB and len(second.devices) == 1
    first = guard.read_gpus(*desktop, gpus=[0])
    assert by_pid(first) == {7001: 13922 * MIB}
    assert "GPU 2" in guard.read_gpus(*desktop, gpus=[1, 2]).problem


def test_an_owners_text_names_who_since_when_and_how_much(desktop, monkeypatch):
    monkeypatch.setattr(guard, "user_name", lambda uid: "ann")
    owner = guard.gpu_owners(guard.read_gpus(*desktop, gpus=[1]), ignore=["Xorg", "gnome-shell", "firefox"])[0]
    assert owner.text == "llama-server pid 4242 of ann holds 10.9 GiB of GPU memory"
    assert (owner.kind, owner.comm, owner.user, owner.since) == (
        "process",
        "llama-server",
        "ann",
        "2023-11-14T22:13:%02dZ" % (20 + 1000 // HZ),
    )


def test_a_document_type_fetches_nothing_and_entities_are_refused(monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("the parser went online"))
    text = xml(card()).replace("\n", '\n<!DOCTYPE nvidia_smi_log SYSTEM "http://127.0.0.1:9/nvsmi.dtd">\n', 1)
    assert guard.parse_nvidia_xml(text).devices
    with pytest.raises(ValueError):
        guard.parse_nvidia_xml(text.replace('dtd">', 'dtd" [<!ENTITY a "b">]>'))


def test_a_warning_of_a_worn_inforom_leaves_a_whole_answer(tmp_path):
    text = "WARNING: one\n" + xml(card()) + "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n"
    assert guard.read_gpus(lay(tmp_path, NVIDIA), Tool((14, text, ""))).devices


def test_a_process_name_that_breaks_the_xml_leaves_the_csv(tmp_path):
    broken = xml(card(rows=[(5150, "a & <b", "4096 MiB")]))
    cards = "index, uuid, memory.total [MiB], memory.used [MiB], memory.free [MiB], name\n0, GPU-a, 24576 MiB, 4200 MiB, 20000 MiB, X\n"
    tool = Tool((0, broken, ""), (0, cards, ""), (0, "5150, GPU-a, 4096\n", ""))
    reading = guard.read_gpus(lay(tmp_path, {**NVIDIA, **process(5150, "a & <b")}), tool)
    assert by_pid(reading) == {5150: 4 * GIB} and reading.devices[0].used == 4200 * MIB
    assert reading.compute_only and guard.gpu_bytes(reading, {1}) is None  # an unlisted one may be a graphics process


def test_memory_that_no_process_explains_is_an_owner(tmp_path):
    reading = guard.read_gpus(lay(tmp_path, NVIDIA), Tool((0, xml(card(used="9000 MiB")), "")))
    (owner,) = guard.gpu_owners(reading)
    assert (owner.kind, owner.bytes, owner.pid) == ("memory", 9000 * MIB, None)
    assert guard.unexplained_memory(reading, reading.devices[0]) == 9000 * MIB
    assert guard.gpu_owners(reading, unexplained="ignore") == guard.gpu_owners(reading, owner_min=9000 * MIB) == []
    assert guard.gpu_bytes(reading, {1}) is None  # it may be his


def test_memory_that_one_of_ours_may_hold_is_asked_for_when_ours_is_gone(tmp_path):
    box = lay(tmp_path, {**NVIDIA, **process(4242, "llama-server")})
    tool = Tool((0, xml(card(used="9000 MiB", rows=[("4242", "llama-server", "N/A")])), ""))
    assert guard.gpu_owners(guard.read_gpus(box, tool), {4242}) == []
    assert guard.gpu_bytes(guard.read_gpus(box, tool), {4242}) is None
    tool.answers["-x"] = (0, xml(card(used="9000 MiB")), "")
    assert [owner.kind for owner in guard.gpu_owners(guard.read_gpus(box, tool), {4242})] == ["memory"]


def test_a_pid_that_only_the_driver_knows_is_read_twice_and_then_an_owner(tmp_path):
    row = ("31794", "[Not Found]", "100 MiB")
    tool = Tool((0, xml(card(rows=[row])), ""))
    box = lay(tmp_path, NVIDIA)
    (owner,) = guard.gpu_owners(guard.read_gpus(box, tool))
    assert len(tool.calls) == 2
    assert owner.text == "pid 31794, which /proc doesn't know, holds 100 MiB of GPU memory"

    def ended_meanwhile(argv, seconds):
        tool.answers["-x"] = (0, xml(card(rows=[row] if not calls else [])), "")
        calls.append(argv)
        return tool(argv, seconds)

    calls = []
    assert guard.gpu_owners(guard.read_gpus(box, ended_meanwhile)) == []


def test_a_card_that_tells_neither_processes_nor_memory_is_unknown(tmp_path):
    box = lay(tmp_path, NVIDIA)
    assert guard.read_gpus(box, Tool((0, xml(card(used="N/A", processes="N/A")), ""))).problem
    reading = guard.read_gpus(box, Tool((0, xml(card(used="9000 MiB", processes="N/A")), "")))
    assert [owner.kind for owner in guard.gpu_owners(reading)] == ["memory"]


def test_a_cut_comm_is_still_the_ignored_name(tmp_path):
    box = lay(tmp_path, {**NVIDIA, **process(9, "kwin_wayland_wr")})
    reading = guard.read_gpus(box, Tool((0, xml(card(rows=[("9", "/usr/bin/x", "900 MiB")])), "")))
    assert guard.gpu_owners(reading, ignore=["kwin_wayland_wrapper"]) == []
    assert guard.gpu_owners(reading, ignore=["x"]) == [] and guard.gpu_owners(reading, ignore=["kwin"])


# ----- unified memory: GB10


@pytest.mark.parametrize("way", ["csv", "xml"])
@pytest.mark.parametrize("state", ["a", "b"])
def test_totals_not_reported_leave_the_process_list_and_the_boxs_memory(tmp_path, state, way):
    given_ = case("gpu-gb10.json")
    tree = {**NVIDIA, **process(5150, "python3"), "proc/meminfo": given_[state]["meminfo"]}
    box = lay(tmp_path, tree)
    rows = [("5150", "python3", "41984 MiB")] if state == "b" else []
    text = xml(card("GPU-3f0c11aa", "N/A", "N/A", "N/A", rows)) if way == "xml" else ""
    tool = Tool((0, text, ""), (0, given_["query-gpu"], ""), (0, given_[state]["compute-apps"], ""))
    reading = guard.read_gpus(box, tool)
    (device,) = reading.devices
    assert (device.total, device.used, device.unified, reading.problem) == (None, None, True, None)
    owners = guard.gpu_owners(reading)
    assert [(owner.pid, owner.bytes) for owner in owners] == ([] if state == "a" else [(5150, 41 * GIB)])
    free = guard.vram_free(reading, guard.available_memory(box))
    assert free == guard.available_memory(box) and free > 60 * GIB
    assert guard.drained(reading, {5150}) is (state == "a") and guard.drained(reading, {1}) is True


# ----- AMD and Intel


def test_each_amdgpu_client_counts_once_for_the_process_that_opened_it(tmp_path):
    reading = guard.read_gpus(lay(tmp_path, case("gpu-amdgpu-fdinfo.json")), no_tool)
    held = {(row.pid, row.device): row.bytes for row in reading.processes}
    assert held == {
        (4242, CARD): (13631488 + 1024) * KIB,
        (4242, "0000:0b:00.0"): 512 * KIB,
        (5150, CARD): 7340032 * KIB,
        (1377, CARD): 614400 * KIB,
        (6001, "0000:c5:00.0"): 25263348 * KIB,
    }
    assert [(device.key, device.unified) for device in reading.devices] == [
        (CARD, False),
        ("0000:0b:00.0", False),
        ("0000:c5:00.0", True),
    ]
    assert guard.unexplained_memory(reading, reading.devices[0]) == 180 * MIB
    assert reading.unreadable == ((7007, "root-thing"),)


def test_a_process_that_may_not_be_looked_into_is_no_owner_while_all_memory_is_explained(tmp_path):
    reading = guard.read_gpus(lay(tmp_path, case("gpu-amdgpu-fdinfo.json")), no_tool)
    names = {"gnome-shell", "llama-server"}
    assert [owner.pid for owner in guard.gpu_owners(reading, ignore=names)] == [5150]
    owners = guard.gpu_owners(reading, ignore=names, owner_min=100 * MIB)
    assert [owner.kind for owner in owners] == ["process", "memory", "memory"]
    assert (
        owners[1].text
        == "180 MiB of GPU memory on %s that no listed process explains (not allowed to look into root-thing pid 7007)"
        % CARD
    )


def test_without_the_cards_counter_such_a_process_makes_it_unknown(tmp_path):
    tree = case("gpu-amdgpu-fdinfo.json")
    del tree["sys/class/drm/card1/device/mem_info_vram_used"]
    reading = guard.read_gpus(lay(tmp_path, tree), no_tool, gpus=[0])
    kinds = [owner.kind for owner in guard.gpu_owners(reading, {4242, 5150, 1377})]
    assert kinds == ["unknown"]
    assert guard.gpu_owners(reading, {4242, 5150, 1377, 7007}) == []
    assert guard.gpu_owners(reading, {4242, 5150, 1377}, unexplained="ignore") == []
    assert guard.vram_free(reading, 9 * GIB) is None


def test_a_folder_without_permission_is_a_process_that_may_not_be_looked_into(tmp_path, monkeypatch):
    box = lay(tmp_path, case("gpu-amdgpu-fdinfo.json"))
    real = os.listdir

    def guarded(path):
        if str(path).endswith("/proc/5150/fd"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", guarded)
    reading = guard.read_gpus(box, no_tool, gpus=[0])
    assert (5150, "python3") in reading.unreadable and guard.gpu_bytes(reading, {5150}) is None
    assert [owner.kind for owner in guard.gpu_owners(reading, {4242}, ignore=["gnome-shell"])] == ["memory"]
    assert guard.gpu_owners(reading, {4242, 5150}, ignore=["gnome-shell"]) == []  # the rest may be ours


def test_a_descriptor_whose_link_cannot_be_read_is_still_looked_into(tmp_path):
    tree = case("gpu-amdgpu-fdinfo.json")
    del tree["proc/5150/fd/7"]
    box = lay(tmp_path, tree)
    (tmp_path / "proc/5150/fd").mkdir()
    (tmp_path / "proc/5150/fd/7").write_text("no link")
    assert by_pid(guard.read_gpus(box, no_tool))[5150] == 7 * GIB


def test_kernel_threads_and_zombies_are_nobody_to_look_into(tmp_path):
    tree = {**process(2, "kthreadd", flags=0x208040), **process(9, "old", state="Z"), **process(10, "sshd")}
    amd = {
        path: text for path, text in case("gpu-amdgpu-fdinfo.json").items() if path.startswith("sys/class/drm/card1/")
    }
    assert guard.read_gpus(lay(tmp_path, {**tree, **amd}), no_tool).unreadable == ((10, "sshd"),)


def test_the_first_started_holder_of_a_shared_client_is_its_owner_even_after_the_pids_wrapped(tmp_path):
    tree = case("gpu-amdgpu-fdinfo.json")
    tree.update(process(4242, "llama-server", start=9000))
    tree.update(process(4300, "llama-helper", start=70))
    reading = guard.read_gpus(lay(tmp_path, tree), no_tool, gpus=[0])
    assert by_pid(reading)[4300] == 13631488 * KIB and by_pid(reading)[4242] == 1024 * KIB


def test_a_card_with_less_vram_than_gtt_is_still_a_card(tmp_path):
    folder = "sys/class/drm/card0/device/"
    tree = {
        folder + "uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:03:00.0\nPCI_ID=1002:73FF\n",
        folder + "mem_info_vram_total": str(8 * GIB),
        folder + "mem_info_vram_used": str(7 * GIB),
        folder + "mem_info_gtt_total": str(32 * GIB),
        folder + "mem_info_gtt_used": "0",
        folder + "mem_info_vram_vendor": "samsung\n",
    }
    (device,) = guard.read_gpus(lay(tmp_path, tree), no_tool).devices
    assert (device.unified, device.total, device.free, device.name) == (False, 8 * GIB, GIB, "amdgpu 1002:73FF")


def test_the_vulkan_apu_counts_vram_and_gtt(tmp_path):
    reading = guard.read_gpus(lay(tmp_path, case("gpu-apu-vulkan.json")), no_tool)
    (device,) = reading.devices
    assert device.unified and device.total == 100 * GIB and device.used == 412090368 + 25348276224
    free = guard.vram_free(reading, 70 * GIB)
    assert free == 70 * GIB > 60 * GIB
    assert guard.vram_free(reading, 120 * GIB) == device.total - device.used


def test_the_rocm_apu_believes_kfd_when_the_counter_stands_still(tmp_path):
    reading = guard.read_gpus(lay(tmp_path, case("gpu-apu-rocm.json")), no_tool)
    assert by_pid(reading) == {4242: 55566139392, 5150: 7 * GIB, 1075718: 0, 31794: 2 * GIB}
    assert guard.gpu_bytes(reading, {4242}) == 55566139392
    owners = guard.gpu_owners(reading, {4242})
    assert [(owner.pid, owner.bytes) for owner in owners] == [(5150, 7 * GIB), (31794, 2 * GIB)]
    assert "doesn't know" in owners[1].text
    assert guard.vram_free(reading, 120 * GIB) < 40 * GIB
    memory = guard.Memory(53 * GIB, 53 * GIB, 0, 0)
    gpu, card = guard.gpu_bytes(reading, {4242}), guard.card_used(reading, {4242})
    assert guard.verdict(guard.Evidence(memory, 90, gpu, card, 52 * GIB, unified=reading.unified)).value == "gpu"


def test_two_witnesses_that_disagree_give_the_larger(tmp_path):
    tree = case("gpu-amdgpu-fdinfo.json")
    node = "sys/class/kfd/kfd/topology/nodes/1/"
    tree.update({node + "gpu_id": "46775\n", node + "properties": "cpu_cores_count 0\ndomain 0\nlocation_id 768\n"})
    tree["sys/class/kfd/kfd/proc/4242/vram_46775"] = str(20 * GIB)
    tree["sys/class/kfd/kfd/proc/5150/vram_46775"] = "4096"
    held = {(row.pid, row.device): row.bytes for row in guard.read_gpus(lay(tmp_path, tree), no_tool).processes}
    assert held[4242, CARD] == 20 * GIB and held[5150, CARD] == 7340032 * KIB


def test_a_proc_that_cannot_be_listed_is_unknown(tmp_path):
    box = lay(tmp_path, case("gpu-apu-vulkan.json"))
    (tmp_path / "proc").rmdir()
    assert guard.read_gpus(box, no_tool).problem


def fdinfo(driver, client, **sizes):
    lines = ["drm-driver:\t%s" % driver, "drm-client-id:\t%d" % client, "drm-pdev:\t%s" % CARD]
    return "\n".join(lines + ["drm-%s:\t%s" % (key.replace("_", "-"), value) for key, value in sizes.items()]) + "\n"


@pytest.mark.parametrize(
    "text, own, host",
    [
        (
            fdinfo(
                "xe",
                1,
                total_vram0="9 GiB",
                resident_vram0="4096 MiB",
                resident_vram1="1 MiB",
                resident_gtt="3 KiB",
                resident_system="5",
            ),
            4097 * MIB,
            3 * KIB + 5,
        ),
        (
            fdinfo("i915", 1, resident_local0="2048 KiB", resident_system0="0", resident_stolen_local0="7 GiB"),
            2 * MIB,
            0,
        ),
        (fdinfo("amdgpu", 1, total_vram="12 KiB"), 12 * KIB, None),
        (fdinfo("i915", 1, engine_render="5 ns"), None, None),
        ("pdev:\t%s\npasid:\t32771\nvram mem:\t512 kB\ngtt mem:\t4 kB\ncpu mem:\t0 kB\n" % CARD, 512 * KIB, 4 * KIB),
        ("pdev:\t03:00.0\npasid:\t32771\nvram mem:\t512 kB\n", 512 * KIB, None),
    ],
)
def test_fdinfo_of_every_driver_and_kernel(text, own, host):
    client = guard.parse_fdinfo(text)
    assert (client.pci, client.own, client.host) == (CARD, own, host)


@pytest.mark.parametrize("text", ["", "pos:\t0\n", "drm-driver:\tamdgpu\n", "drm-client-id:\t1\n"])
def test_fdinfo_of_no_client(text):
    assert guard.parse_fdinfo(text) is None


def test_a_kernel_that_tells_no_memory_leaves_the_process_unreadable(tmp_path):
    tree = {
        path: text for path, text in case("gpu-amdgpu-fdinfo.json").items() if path.startswith("sys/class/drm/card1/")
    }
    tree.update({**process(5, "old"), "proc/5/fd/3": "/dev/dri/renderD128", "proc/5/fdinfo/3": "pos:\t0\n"})
    assert guard.read_gpus(lay(tmp_path, tree), no_tool).unreadable == ((5, "old"),)


def intel(card_, pci, driver, **files):
    folder = "sys/class/drm/%s/" % card_
    tree = {folder + "device/uevent": "DRIVER=%s\nPCI_SLOT_NAME=%s\n" % (driver, pci)}
    tree.update({folder + name.replace("__", "/"): text for name, text in files.items()})
    return tree


def test_an_intel_card_and_the_gpu_of_a_processor(tmp_path):
    tree = {
        **intel("card0", "0000:00:02.0", "i915"),
        **intel("card1", CARD, "xe", device__tile0__physical_vram_size_bytes=str(16 * GIB)),
        **process(7, "llama-server"),
        "proc/7/fd/3": "/dev/dri/renderD129",
        "proc/7/fdinfo/3": fdinfo("xe", 3, resident_vram0="9 GiB", resident_gtt="1 GiB"),
        **process(8, "sshd"),
    }
    reading = guard.read_gpus(lay(tmp_path, tree), no_tool)
    assert [(d.key, d.total, d.used, d.unified) for d in reading.devices] == [
        ("0000:00:02.0", None, None, True),
        (CARD, 16 * GIB, None, False),
    ]
    assert by_pid(reading) == {7: 9 * GIB}
    (owner,) = guard.gpu_owners(reading, {7})  # sshd's files can't be read, and the card has no counter
    assert owner.kind == "unknown" and "sshd pid 8" in owner.text and CARD in owner.text


def test_the_gpu_of_an_intel_processor_is_free_beside_processes_that_may_not_be_looked_into(tmp_path):
    reading = guard.read_gpus(lay(tmp_path, {**intel("card0", "0000:00:02.0", "i915"), **process(8, "sshd")}), no_tool)
    assert reading.vendor == "intel" and guard.gpu_owners(reading) == []
    assert guard.vram_free(reading, 9 * GIB) == 9 * GIB


def test_vram_free_asks_the_cards_and_not_the_small_gpu_beside_them(tmp_path):
    reading = guard.read_gpus(lay(tmp_path, case("gpu-amdgpu-fdinfo.json")), no_tool)
    assert guard.vram_free(reading, 9 * GIB) == 25753026560 - 22293774336 + 17163091968 - 31457280
    apu = guard.read_gpus(guard.Box(str(tmp_path)), no_tool, gpus=[2])
    assert guard.vram_free(apu, 9 * GIB) == 9 * GIB


# ----- the verdict

MODEL = int(15.5 * GIB)


def status(tmp_path, name):
    box = lay(tmp_path, {"proc/4242/status": case("verdicts.json")["status"][name]})
    return box.memory(4242)


@pytest.mark.parametrize("model", [MODEL, None], ids=["model known", "model unknown"])
@pytest.mark.parametrize("look", case("verdicts.json")["looks"], ids=lambda look: "%(file)s-%(gpu_bytes)s" % look)
def test_verdicts_of_real_status_files(tmp_path, look, model):
    found = guard.verdict(guard.Evidence(status(tmp_path, look["file"]), look["age_s"], look["gpu_bytes"], model=model))
    expected = {"not judged": ("unknown", "old"), "gone": ("unknown", "gone")}.get(look["verdict"])
    assert (found.value, found.because) == expected if expected else found.value == look["verdict"]
    assert found.evidence


@pytest.mark.parametrize(
    "used, value", [(16 * GIB, "gpu"), (300 * MIB, "cpu"), (8 * GIB, "unknown"), (None, "unknown")]
)
@pytest.mark.parametrize("name", ["cpu-mmap", "gpu-mmap"])
def test_with_unreadable_gpu_bytes_the_cards_own_counter_is_the_next_witness(tmp_path, name, used, value):
    assert guard.verdict(guard.Evidence(status(tmp_path, name), 90, None, used, MODEL)).value == value


def test_vmrss_never_decides_on_unified_memory(tmp_path):
    memory = status(tmp_path, "cpu-anon")
    for used in (None, 0, GIB):
        assert guard.verdict(guard.Evidence(memory, 25, None, used, MODEL, unified=True)).value == "unknown"
    # managed memory is nobody's GPU memory, but its process has a context there
    assert guard.verdict(guard.Evidence(memory, 25, 200 * MIB, None, MODEL, unified=True)).value == "unknown"
    assert guard.verdict(guard.Evidence(memory, 25, 16 * GIB, None, MODEL, unified=True)).value == "gpu"
    assert guard.verdict(guard.Evidence(memory, 25, 0, None, MODEL, unified=True)).value == "cpu"


def test_what_is_meant_asleep_or_partial_is_no_fallback(tmp_path):
    memory = status(tmp_path, "cpu-anon")
    for facts, because in (
        (guard.Evidence(memory, 25, 0, 0, MODEL, meant_for_cpu="-ngl 0"), "meant"),
        (guard.Evidence(status(tmp_path, "healthy"), 25, 0, 0, MODEL, asleep=True), "asleep"),
        (guard.Evidence(status(tmp_path, "healthy"), 25, 0, 0, MODEL), "no sign"),
        (guard.Evidence(memory, 25, 6 * GIB, None, MODEL), "partial"),
        (guard.Evidence(memory, 25, None, None, MODEL, max_rss=40 * GIB), "meant"),
    ):
        found = guard.verdict(facts)
        assert (found.value, found.because) == ("unknown", because)


def test_a_small_model_on_the_cpu_is_seen_below_the_common_limit():
    assert guard.verdict(guard.Evidence(guard.Memory(5 * GIB, 5 * GIB, 0, 0), 25, None, None, 4 * GIB)).value == "cpu"
    assert guard.verdict(guard.Evidence(guard.Memory(GIB, GIB, 0, 0), 25, None, None, 4 * GIB)).because == "no sign"


def test_an_old_engines_prompt_cache_is_no_weights():
    cache = guard.Memory(9 * GIB, 9 * GIB, 0, 0)
    assert guard.verdict(guard.Evidence(cache, 90000, 0, None, MODEL)).value == "unknown"
    swapped = guard.Memory(2 * GIB, 2 * GIB, 0, 14 * GIB)
    assert guard.verdict(guard.Evidence(swapped, 90000, 0, None, MODEL)).value == "cpu"
    mapped = guard.Memory(16 * GIB, GIB, 15 * GIB, 0)
    assert guard.verdict(guard.Evidence(mapped, 90000, 0, None, MODEL)).value == "cpu"


def test_the_evidence_names_each_figure(tmp_path):
    found = guard.verdict(guard.Evidence(status(tmp_path, "cpu-mmap"), 90, 314572800, 5 * GIB, MODEL))
    assert found.evidence == (
        "1m30s old",
        "VmRSS is 16 GiB: 878.9 MiB anonymous, 15.1 GiB of files",
        "its GPU memory is 300 MiB",
        "the card's used memory is 5 GiB",
        "the model is 15.5 GiB",
        "the weights are in the box's memory, not on the GPU",
    )


def test_what_others_hold_is_not_the_engines(desktop):
    reading = guard.read_gpus(*desktop, gpus=[1])
    assert guard.card_used(reading, {4242}) == (12900 - 146 - 811 - 620) * MIB
    assert guard.gpu_bytes(reading, {4242}) == 11200 * MIB and guard.gpu_bytes(reading, {1}) == 0


# ----- the tool is run with a deadline


def script(tmp_path, monkeypatch, text):
    path = tmp_path / "some-tool"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + ":" + os.environ["PATH"])


def test_a_tool_is_run_and_its_streams_are_kept_apart(tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, "echo out; echo err >&2; exit 18\n")
    assert guard.run_tool(["some-tool"], 10) == (18, "out\n", "err\n")
    assert guard.run_tool(["no-such-tool"], 10) == (None, "", "no-such-tool: not found")


def test_a_tool_that_hangs_is_killed_at_its_deadline(tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, "trap '' TERM; echo begun; sleep 60; echo never\n")
    began = time.monotonic()
    assert guard.run_tool(["some-tool"], 0.3) == (guard.KILLED, "begun\n", "some-tool did not answer in time (0s)")
    assert time.monotonic() - began < 5


def test_a_tool_that_cannot_be_killed_is_left_behind_and_named(tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, "exec sleep 2\n")
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    began = time.monotonic()
    code, _, err = guard.run_tool(["some-tool"], 0.2)
    assert code == guard.KILLED and "can't be killed: pid " in err and time.monotonic() - began < 1.9


def test_a_tool_that_prints_without_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "TOOL_LIMIT", 1 << 20)
    script(tmp_path, monkeypatch, "exec yes\n")
    code, _, err = guard.run_tool(["some-tool"], 20)
    assert code == guard.KILLED and "printed more than 1 MiB" in err


def test_a_grandchild_that_keeps_the_pipe_open_is_not_waited_for(tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, "echo out; sleep 3 & exit 0\n")
    began = time.monotonic()
    assert guard.run_tool(["some-tool"], 20) == (0, "out\n", "")
    assert time.monotonic() - began < 2


# ----- garbage is unknown, never an exception and never "free"

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PIECES = st.lists(
    st.sampled_from([
        '<?xml version="1.0" ?>', "<nvidia_smi_log>", "</nvidia_smi_log>", "<gpu>", "</gpu>", '<gpu id="a">', "<processes>", "</processes>",
        "<process_info>", "</process_info>", "<pid>7</pid>", "<pid>x</pid>", "<used_memory>7 MiB</used_memory>", "<fb_memory_usage>",
        "</fb_memory_usage>", "<total>1 MiB</total>", "<used>[N/A]</used>", "<attached_gpus>1</attached_gpus>", "N/A", "7 MiB", "-1",
        "&x;", "]]>", "<!DOCTYPE a [", '<!ENTITY a "b">', "\x00", "\x1b", "é", "\ud800",
    ])
)  # fmt: skip


@QUICK
@given(
    st.one_of(st.text(), PIECES.map("".join), st.binary().map(lambda raw: raw.decode("utf-8", "replace"))),
    st.sampled_from([0, 14, 9, -11]),
)
def test_any_answer_of_nvidia_smi_is_a_reading_or_a_problem(tmp_path_factory, text, code):
    box = lay(tmp_path_factory.mktemp("box"), NVIDIA)
    reading = guard.read_gpus(box, lambda argv, seconds: (code, text, ""))
    assert (reading.problem is None) == bool(reading.devices)
    if reading.problem:
        assert guard.gpu_owners(reading)[0].kind == "unknown" and "\n" not in reading.problem
    guard.gpu_owners(reading), guard.vram_free(reading, 1)


@QUICK
@given(st.integers(0, 10**9))
def test_an_xml_cut_anywhere_is_a_problem(position):
    text = (CASES / "gpu-nvidia-mig-and-desktop.xml").read_text()
    with pytest.raises(ValueError):
        guard.parse_nvidia_xml(text[: position % text.index("</nvidia_smi_log>")])


WORDS = st.lists(
    st.sampled_from(
        ["index", "uuid", "memory.total [MiB]", "memory.used", ", ", "\n", "0", "7", "[N/A]", "GPU-a", "x", " "]
    )
).map("".join)


@QUICK
@given(st.one_of(st.text(), WORDS), st.one_of(st.text(), WORDS))
def test_any_csv_is_a_reading_or_a_problem(cards, apps):
    try:
        reading = guard.parse_nvidia_csv(cards, apps)
    except ValueError:
        return
    assert reading.devices and len(reading.processes) == len([line for line in apps.splitlines() if line.strip()])


KEYS = st.sampled_from(
    [
        "drm-driver",
        "drm-client-id",
        "drm-pdev",
        "drm-memory-vram",
        "drm-resident-vram",
        "drm-total-gtt",
        "pasid",
        "vram mem",
    ]
)
VALUES = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.sampled_from(["7 KiB", "7 kB", CARD, "x KiB", "9" * 40, "7 TiB", "\u0667"]),
)


@QUICK
@given(
    st.one_of(
        st.text(), st.lists(st.tuples(KEYS, VALUES)).map(lambda lines: "".join("%s:\t%s\n" % line for line in lines))
    )
)
def test_any_fdinfo_is_a_client_or_none(text):
    client = guard.parse_fdinfo(text)
    assert client is None or all(count is None or count >= 0 for count in (client.own, client.host))


@QUICK
@given(st.binary(max_size=60), st.sampled_from(sorted(case("gpu-amdgpu-fdinfo.json"))))
def test_any_garbage_in_a_file_of_the_box_hides_nothing(tmp_path_factory, garbage, path):
    """Whatever a file says: no exception, and a large holder is seen as an owner, as unexplained memory or as unknown."""
    root = tmp_path_factory.mktemp("box")
    box = lay(root, case("gpu-amdgpu-fdinfo.json"))
    if not (root / path).is_symlink():
        (root / path).write_bytes(garbage)
    reading = guard.read_gpus(box, no_tool)
    if path.endswith("fdinfo/5") and "4242" in path:  # the dup on fd 6 still tells
        assert by_pid(reading)[4242] >= 13 * GIB
    if not path.startswith("sys/"):
        assert guard.gpu_owners(reading, {4242}, ignore=["gnome-shell"])


@pytest.mark.parametrize("status, asleep", [("suspended", True), ("active", False), (None, False)])
def test_a_card_that_sleeps_is_told_apart(tmp_path, status, asleep):
    tree = dict(case("gpu-amdgpu-fdinfo.json"))
    card = next(path.rpartition("/")[0] for path in tree if path.endswith("mem_info_vram_used"))
    if status is not None:
        tree[card + "/power/runtime_status"] = status + "\n"
    reading = guard.read_gpus(lay(tmp_path, tree), no_tool)
    assert any(device.asleep for device in reading.devices) is asleep

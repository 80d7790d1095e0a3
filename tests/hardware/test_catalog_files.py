"""The clusters of the catalog, and files of one's own: what is wrong with them is said with file and key."""

from pathlib import Path

import pytest

from moestro.errors import MoestroError
from moestro.hardware.catalog import CLUSTERS_DIR, DEVICES_DIR, cluster_ids, device_ids, load_cluster, load_device

from .helpers import figures


class TestClusters:
    @pytest.mark.parametrize("cluster_id", cluster_ids())
    def test_file_is_valid(self, cluster_id: str) -> None:
        cluster = load_cluster(cluster_id)
        assert cluster.id == cluster_id
        assert cluster.source
        for path, figure in figures(cluster):
            assert figure.nominal is None or figure.source, path

    def test_no_cluster_is_called_like_a_device(self) -> None:
        assert not set(cluster_ids()) & set(device_ids())

    def test_zaya1(self) -> None:
        cluster = load_cluster("zaya1")
        (pool,) = cluster.pools
        assert cluster.num_devices == 1024
        assert (pool.node.nics, pool.node.rails, pool.node.nic_gbit.nominal) == (8, 8, 400)
        # > 750 PFLOP/s of "max-achievable": 732 a device, which the public record here (668) does not reach.
        assert 1024 * (load_device("mi300x").peak_flops("bf16", achieved=True) or 0) == pytest.approx(750e15, rel=0.1)

    def test_systems_of_the_2019_study(self) -> None:
        assert [load_cluster(c).num_devices for c in ("dgx-2", "p3dn-2", "ac922-4", "ts4-2080ti")] == [16, 16, 16, 8]
        between = [load_cluster(c).pools[0].levels[0].gbps for c in ("ac922-4", "p3dn-2")]
        assert [figure.best for figure in between] == [6, pytest.approx(1.25 / 8)]


TINY = """
name = "mine"
[[pools]]
nodes = 2
[pools.node]
devices = { h100-sxm = 8 }
"""


class TestErrors:
    def refused(self, folder: Path, text: str) -> str:
        path = folder / "mine.toml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(MoestroError) as caught:
            load_cluster(str(path))
        assert str(caught.value).startswith((f"{path}: ", f"{path} is not"))
        return str(caught.value).removeprefix(str(path))

    def test_own_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_text(TINY, encoding="utf-8")
        assert load_cluster(str(path)).num_devices == 16
        assert load_cluster(str(path)).id == "mine"

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (
                "h100-sxm",
                "h100-sxn",
                "pools.0.node.devices: no device 'h100-sxn' in the catalog. Did you mean 'h100-sxm'?",
            ),
            ("= 8 }", "= 0 }", "pools.0.node.devices.h100-sxm: 0 devices"),
            ("nodes = 2", "node_count = 2", "unknown key 'pools.0.node_count'"),
            ("nodes = 2", "nodes = 0", "bad value for 'pools.0.nodes': 0"),
            ("nodes = 2", "", "missing key 'pools.0.nodes'"),
            (
                "[pools.node]",
                '[pools.node]\nlink = "NVLink5"',
                "link: h100-sxm has no link 'NVLink5'. Did you mean 'NVLink4'?",
            ),
            ("[pools.node]", '[pools.node]\nhost = "xeon-8481"', "host: no device 'xeon-8481' in the catalog. Did you"),
            ("[pools.node]", "[pools.node]\nnicks = 8", "unknown key 'pools.0.node.nicks'. Did you mean 'nics'?"),
            (
                "[pools.node]",
                "[pools.node]\nnic_gbit = { nominal = 400 }",
                "pools.0.node.nic_gbit: a nominal figure says",
            ),
            ("[pools.node]", "[pools.node]\nrails = [", " is not valid TOML"),
            ("pools", "pool", "unknown key 'pool'. Did you mean 'pools'?"),
            (
                "[pools.node]",
                '[[pools.levels]]\nname = "leaf"\nmembers = 1\n[pools.node]',
                "pools.0.levels join 1 nodes of 2",
            ),
            ("[[pools]]", '[[wan]]\nregions = ["a", "b"]\n[[pools]]', "no pool is in region 'a'"),
        ],
    )
    def test_wrong_file(self, tmp_path: Path, old: str, new: str, message: str) -> None:
        assert old in TINY
        assert message in self.refused(tmp_path, TINY.replace(old, new))

    def test_unknown_names(self) -> None:
        with pytest.raises(MoestroError, match=r"no device 'h10-sxm'.*Did you mean 'h100-sxm'"):
            load_device("h10-sxm")
        with pytest.raises(MoestroError, match=r"no device 'h100-pcix'.*Did you mean 'h100-pcie'"):
            load_device("h100-pcix")  # and not an H100 because it has the word
        assert load_device("NVIDIA H100 80GB HBM3 of a node").id == "h100-sxm"
        with pytest.raises(MoestroError, match=r"no cluster 'zaya2'\. Did you mean 'zaya1'"):
            load_cluster("zaya2")

    def test_missing_file_folder_and_bytes(self, tmp_path: Path) -> None:
        with pytest.raises(MoestroError, match=r"cannot read .*No such file"):
            load_cluster(str(tmp_path / "none.toml"))
        with pytest.raises(MoestroError, match="no cluster"):
            load_cluster(str(tmp_path))
        (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
        with pytest.raises(MoestroError, match="not valid TOML"):
            load_cluster(str(tmp_path / "bytes.toml"))

    def test_wrong_device_file(self, tmp_path: Path) -> None:
        text = (DEVICES_DIR / "h100-sxm.toml").read_text(encoding="utf-8")
        for old, new, message in (
            ("peak_tflops.bf16", "peak_tflops.bf61", "bad value for 'peak_tflops.bf61'.*Did you mean 'bf16'"),
            ('topology = "switch"', 'topology = "swich"', "bad value for 'links.0.topology'.*Did you mean 'switch'"),
            ("achieved = 794.5", "achieved = 1794.5", "peak_tflops.bf16: achieved 1794.5 is above nominal 989"),
            ("usd_per_hour_low", "usd_per_hour_lo", "unknown key 'price.usd_per_hour_lo'.*'usd_per_hour_low'"),
        ):
            assert old in text
            path = tmp_path / "own.toml"
            path.write_text(text.replace(old, new, 1), encoding="utf-8")
            with pytest.raises(MoestroError, match=message):
                load_device(str(path))

    def test_own_device_file(self, tmp_path: Path) -> None:
        path = tmp_path / "own.toml"
        path.write_bytes((DEVICES_DIR / "h100-sxm.toml").read_bytes())
        assert load_device(str(path)).id == "own"

    def test_nothing_but_toml_in_the_folders(self) -> None:
        for folder in (DEVICES_DIR, CLUSTERS_DIR):
            assert {path.suffix for path in folder.iterdir()} == {".toml"}

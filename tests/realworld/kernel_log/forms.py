"""Forms in which tools write one kernel message."""

import json

import pandas as pd

XID = "NVRM: Xid (PCI:0000:10:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
WHEN = pd.Timestamp("2026-03-01T02:20:00Z")
BOOT_TIME = "2026-02-19T02:19:59.757832Z"  # 864000.242168 s before
EPOCH_S = int(WHEN.timestamp())
MS, US, NS = EPOCH_S * 1000, EPOCH_S * 10**6, f"{EPOCH_S}000000000"
ISO, ISO_MS = "2026-03-01T02:20:00Z", "2026-03-01T02:20:00.000Z"

LOCALES = {
    "de": "[So Mär  1 02:20:00 2026]",
    "de, day first": "[So 01. Mär 2026 02:20:00]",
    "de, decomposed": "[So Ma\u0308r  1 02:20:00 2026]",
    "fr": "[dim. mars  1 02:20:00 2026]",
    "es": "[dom mar  1 02:20:00 2026]",
    "pl": "[nie mar  1 02:20:00 2026]",
    "tr": "[Paz Mar  1 02:20:00 2026]",
    "ru": "[Вс мар  1 02:20:00 2026]",
    "el": "[Κυρ Μαρ  1 02:20:00 2026]",
    "zh": "[日 3月  1 02:20:00 2026]",
    "ja": "[日  3月  1 02:20:00 2026]",
    "ja, numbers": "[2026年03月01日 02:20:00]",
}

PLAIN = {
    "node problem detector": "I0301 02:20:01.5  1 log_monitor.go:160] New status generated: &{Source:kernel-monitor "
    "Events:[{Severity:warn Timestamp:2026-03-01 02:20:00 +0000 UTC Reason:XID Message:",
    "fluent-bit": f'[0] kern.log: [[{EPOCH_S}.000000000, {{}}], {{"host"=>"node-0", "ident"=>"kernel", "message"=>"',
    "journalctl short": "Mar 01 02:20:00 node-0 kernel: ",
    "journalctl short-iso, systemd before 255": "2026-03-01T02:20:00+0000 node-0 kernel: ",
    "journalctl short-full": "Sun 2026-03-01 02:20:00 UTC node-0 kernel: ",
    "journalctl short-full, EST5EDT": "Sat 2026-02-28 21:20:00 EST node-0 kernel: ",
    "journalctl short-full, numeric zone": "Sun 2026-03-01 05:20:00 +03 node-0 kernel: ",
    "journalctl short-unix": f"{EPOCH_S}.000000 node-0 kernel: ",
    "journalctl short-monotonic": "[864000.242168] node-0 kernel: ",
    "journalctl with-unit": "Sun 2026-03-01 02:20:00 UTC node-0 kernel[n/a]: ",
    "journalctl short, cs": "bře 01 02:20:00 node-0 kernel: ",
    "journalctl short, ja": "3月 01 02:20:00 node-0 kernel: ",
    "dmesg": "[864000.242168] ",
    "dmesg --decode": "kern  :err   : [864000.242168] ",
    "dmesg --raw": "<3>[864000.242168] ",
    "dmesg --show-delta": "[864000.242168 <    0.000012>] ",
    "dmesg with caller": "[864000.242168][ T1234] ",
    "dmesg with caller, CPU": "<3>[864000.242168][    C3] ",
    "dmesg -T": "[Sun Mar  1 02:20:00 2026] ",
    "dmesg -T, colour": "\x1b[32m[Sun Mar  1 02:20:00 2026] \x1b[0m\x1b[33m",
    "dmesg iso --decode": "kern  :err   : 2026-03-01T02:20:00,000000+00:00 ",
    "/dev/kmsg": "3,1042,864000242168,-;",
    "rsyslog traditional": "Mar  1 02:20:00 node-0 kernel: [864000.242168] ",
    "rsyslog, fully qualified": "Mar  1 02:20:00 node-0.example.com kernel: [864000.242168] ",
    "RFC 5424": "<3>1 2026-03-01T02:20:00.000000+00:00 node-0 kernel - - - ",
    "RFC 5424, structured data": '<3>1 2026-03-01T02:20:00Z node-0 kernel - - [meta sequenceId="7"] ',
    "RFC 5424 over TCP": "118 <3>1 2026-03-01T02:20:00Z node-0 kernel - - - ",
    "RFC 5424 with a byte order mark": "<3>1 2026-03-01T02:20:00Z node-0 kernel - - - \ufeff",
    "a level of one letter": "2026-03-01T02:20:00.000 I ",
    "a level": "2026-03-01 02:20:00 CRITICAL kernel: ",
    "a number that is no year": "Mar  1 02:20:00 1234 kernel: ",
    "syslog-ng behind a relay": "Mar  1 02:20:00 node-0/relay-1 kernel: ",
    "syslog-ng behind two relays": "2026-03-01T02:20:00+00:00 s_net@node-0/relay-1/10.0.0.9 kernel: [864000.242168] ",
    "level in place of the host": "2026-03-01T02:20:00+00:00 ERROR kernel: ",
    "busybox": "Mar  1 02:20:00 kern.err kernel: ",
    "OpenWrt logread": "Sun Mar  1 02:20:00 2026 kern.err kernel: [864000.242168] ",
    "year after the day": "Mar  1 2026 02:20:00 node-0 kernel: ",
    "year after the day, comma": "Mar 1, 2026, 02:20:00 node-0 kernel: ",
    "12 hours": "Mar 1 2026 02:20:00 AM node-0 kernel: ",
    "date(1)": "Sun Mar  1 02:20:00 UTC 2026 node-0 kernel: ",
    "day first": "01 Mar 2026 02:20:00 node-0 kernel: ",
    "web server": "01/Mar/2026:02:20:00 +0000 node-0 kernel: ",
    "ISO with a space and a comma": "2026-03-01 02:20:00,123 node-0 kernel: ",
    "slashes": "2026/03/01 02:20:00 node-0 kernel: ",
    "dots, year first": "2026.03.01 02:20:00 node-0 kernel: ",
    "klog": "E0301 02:20:00.000000   12345 kmsg.go:17] ",
    "milliseconds": f"{EPOCH_S}000 ",
    "CRI with printk": "2026-03-01T02:20:00.000000123Z stderr F [864000.242168] ",
    "CRI around syslog": "2026-03-01T09:00:00.000000123Z stdout F Mar  1 02:20:00 node-0 kernel: ",
    "CRI around dmesg -T": "2026-03-01T09:00:00.000000123Z stdout F [Sun Mar  1 02:20:00 2026] ",
    "kubectl logs of syslog": "[pod/kmsg-x7/reader] 2026-03-01T09:00:00Z Mar  1 02:20:00 node-0 kernel: ",
    "docker compose": "kmsg-1  | 2026-03-01T02:20:00.000000000Z ",
    "logcli": '2026-03-01T02:20:00Z {host="node-0", job="kernel"} ',
    "behind a pager's line number": "1234:Mar  1 02:20:00 node-0 kernel: ",
    "grep with the file's name": "/var/log/kern.log:Mar  1 02:20:00 node-0 kernel: ",
    "pdsh of dmesg -T": "node-0: [Sun Mar  1 02:20:00 2026] ",
    "host before the kernel's stamp": "node-0 kernel: [864000.242168] ",
    "Talos": "node-0: kern:     err: [2026-03-01T02:20:00.123Z]: ",
    "Datadog CSV": '"2026-03-01T02:20:00.000Z","node-0","kernel","',
    "runit": "2026-03-01_02:20:00.12345 node-0 kernel: ",
    "netconsole with release": "6.8.0-52-generic,3,1042,864000242168,-;",
    "Ansible": "node-0 | CHANGED | rc=0 >>\n[Sun Mar  1 02:20:00 2026] ",
    "Grafana's text": 'Common labels: {"job":"kernel","host":"node-0"}\n\n2026-03-01T02:20:00.000Z\t',
    "Grafana's CSV": '"2026-03-01T02:20:00.000Z","{host=""node-0""}","',
    "logfmt": 'ts=2026-03-01T02:20:00Z level=error host=node-0 msg="',
    **{f"dmesg -T, {name}": f"{stamp} " for name, stamp in LOCALES.items()},
}


def wrapped(**fields: object) -> str:
    return json.dumps(fields)


def attribute(key: str, value: str) -> dict[str, object]:
    """An attribute of OpenTelemetry."""
    return {"key": key, "value": {"stringValue": value}}


LINE = f"Mar  1 02:20:00 node-0 kernel: {XID}"
RECORD = {"timeUnixNano": NS, "body": {"kvlistValue": {"values": [attribute("MESSAGE", XID)]}}}
RESOURCE = {"attributes": [attribute("k8s.node.name", "node-0")]}
RESOURCE_LOG = {"resource": RESOURCE, "scopeLogs": [{"logRecords": [RECORD]}]}
GOOGLE_LABELS = {"compute.googleapis.com/resource_name": "node-0"}
INSIGHTS = {"@timestamp": "2026-03-01 02:20:00.000", "@message": XID, "@logStream": "node-0"}
WHOLE = {
    "Splunk rows": json.dumps({"fields": ["_time", "host", "_raw"], "rows": [[ISO, "node-0", f"kernel: {XID}"]]}),
    "journal JSON": wrapped(__REALTIME_TIMESTAMP=str(US), _HOSTNAME="node-0", MESSAGE=XID),
    "journal JSON, bytes": wrapped(__REALTIME_TIMESTAMP=str(US), MESSAGE=list(XID.encode() + b"\xff")),
    "journal JSON, pretty": json.dumps(
        {"__REALTIME_TIMESTAMP": str(US), "_HOSTNAME": "node-0", "MESSAGE": XID}, indent="\t"
    ),
    "journal export": f"__CURSOR=s=1\n__REALTIME_TIMESTAMP={US}\n_HOSTNAME=node-0\nMESSAGE={XID}\n",
    "journal verbose": "Sun 2026-03-01 02:20:00.000000 UTC [s=ab12;i=1;b=cd;m=1;t=2;x=3]\n"
    f"    _TRANSPORT=kernel\n    _HOSTNAME=node-0\n    MESSAGE={XID}\n",
    "dmesg --json": json.dumps({"dmesg": [{"pri": 3, "time": 864000.242168, "msg": XID}]}, indent=3),
    "docker json-file": wrapped(log=LINE + "\n", stream="stdout", time="2026-03-01T09:00:00.1Z"),
    "docker json-file of kmsg": wrapped(log=XID + "\n", stream="stdout", time="2026-03-01T02:20:00.1Z"),
    "fluent-bit": wrapped(date=EPOCH_S + 0.25, log=XID, kubernetes={"host": "node-0", "pod_name": "kmsg-x7"}),
    "GELF": wrapped(version="1.1", host="node-0", short_message=XID, timestamp=EPOCH_S + 0.5),
    "Google Cloud": wrapped(textPayload=XID, timestamp=ISO, resource={"labels": {"node_name": "node-0"}}),
    "logcli jsonl": wrapped(labels={"node": "node-0"}, line=XID, timestamp=ISO),
    "Loki answer": wrapped(data={"result": [{"stream": {"host": "node-0"}, "values": [[NS, XID]]}]}),
    "CloudWatch": wrapped(
        events=[
            {"timestamp": MS - 60_000, "message": "node-0 systemd[1]: Started nvidia-persistenced"},
            {"timestamp": MS, "message": f"node-0 kernel: [864000.242168] {XID}"},
        ],
        nextToken="f/36",
    ),
    "Elastic search": wrapped(
        hits={"hits": [{"_source": {"@timestamp": MS, "message": XID, "host": {"name": "node-0"}}}]}
    ),
    "Splunk export": wrapped(result={"_time": "2026-03-01T02:20:00.000+00:00", "host": "node-0", "_raw": XID}),
    "Splunk HEC": wrapped(time=EPOCH_S, host="node-0", event=XID),
    "numbers where a table has its columns": wrapped(time=ISO, host="node-0", msg=XID, fields=3, schema=1),
    "Elastic, original": json.dumps({"@timestamp": ISO, "log": {"original": XID}}),
    "Telegraf": wrapped(fields={"message": XID}, tags={"hostname": "node-0"}, timestamp=EPOCH_S),
    "Graylog search": wrapped(messages=[{"message": {"timestamp": EPOCH_S, "source": "node-0", "message": XID}}]),
    "Datadog": wrapped(id="A", content={"timestamp": ISO_MS, "host": "node-0", "message": XID}),
    "OpenTelemetry": wrapped(timeUnixNano=NS, body={"stringValue": XID}, attributes=[attribute("host.name", "node-0")]),
    "OpenTelemetry resource": wrapped(resourceLogs=[RESOURCE_LOG]),
    "CloudWatch Insights": wrapped(results=[[{"field": field, "value": value} for field, value in INSIGHTS.items()]]),
    "CloudWatch streams": wrapped(events=[{"logStreamName": "node-0", "timestamp": MS, "message": XID}]),
    "Kibana fields": wrapped(fields={"@timestamp": [ISO_MS], "host.name": ["node-0"], "message": [XID]}),
    "Google Cloud, instance": json.dumps(
        [{"jsonPayload": {"message": XID}, "timestamp": ISO, "labels": GOOGLE_LABELS}], indent=2
    ),
    "Grafana's JSON": json.dumps([{"line": XID, "timestamp": NS, "fields": {"nodename": "node-0"}}], indent=2),
    "Azure containers": wrapped(**{"TimeGenerated [UTC]": ISO, "Computer": "node-0", "LogMessage": XID}),
    "Vector on Kubernetes": wrapped(timestamp=ISO, message=XID, kubernetes={"pod_node_name": "node-0"}),
    "syslog-ng": wrapped(PROGRAM="kernel", MESSAGE=XID, HOST="node-0", DATE="Mar  1 02:20:00"),
    "journal sequence": "\x1e" + wrapped(__REALTIME_TIMESTAMP=str(US), _HOSTNAME="node-0", MESSAGE=XID),
    "Google Cloud, serial console": wrapped(
        textPayload=f"[ 12.5] {XID}",
        timestamp=ISO,
        labels={"instance_name": "node-0"},
        resource={"type": "gce_instance", "labels": {"instance_id": "12"}},
    ),
    "Oracle Cloud": wrapped(
        datetime=MS,
        logContent={"data": {"message": XID}, "source": "node-0", "time": ISO_MS},
    ),
    "fluentd in a file": f"2026-03-01T02:20:00+00:00\tkernel\t{wrapped(message=XID, host='node-0')}",
    "JSON in CRI": f"2026-03-01T02:20:00.1Z stdout F {wrapped(MESSAGE=XID, _HOSTNAME='node-0')}",
    "JSON in docker compose": f"kmsg-1  | {wrapped(log=XID, time='2026-03-01T02:20:00Z', host='node-0')}",
    "JSON in docker's": wrapped(
        log=wrapped(MESSAGE=XID, _HOSTNAME="node-0") + "\n", time="2026-03-01T02:20:00.5Z", stream="stdout"
    ),
    # https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/Container-Insights-setup-logs-FluentBit.html
    "JSON in CloudWatch": wrapped(
        events=[
            {
                "logStreamName": "ip-10-0-0-1-application.var.log.containers.kmsg",
                "timestamp": MS,
                "message": wrapped(log=XID, kubernetes={"host": "node-0"}),
            }
        ]
    ),
    "Windows line end": f"2026-03-01T02:20:00Z node-0 kernel: {XID}\r",
    "repeated": f"2026-03-01T02:20:00Z node-0 kernel: message repeated 12 times: [ {XID}]",
}
FORMS = {name: prefix + XID for name, prefix in PLAIN.items()} | WHOLE

// The rules and dashboards as a monitoring mixin (https://monitoring.mixins.dev), from the same files that Prometheus and
// Grafana load. go-jsonnet 0.18 or newer (std.parseYaml of the C++ one does not read text with quotes):
//
//   jsonnet -e '(import "mixin.libsonnet").prometheusAlerts'
//
// Thresholds are not here: alerts compare with what the daemons export (docs/alerts.md).
local groups(text) = std.parseYaml(text).groups;
local without_slash(url) = std.rstripChars(url, '/');

{
  _config+:: {
    // Put before the runbooks' file names; empty: docs/runbooks/NAME.md as in the project.
    runbookBaseUrl: '',
    // Your Grafana, put before the path in dashboard_url; empty: the path alone.
    dashboardBaseUrl: '',
    // Address that the dashboards' link Logs opens at the start; empty: Grafana's Explore.
    logsUrl: '',
    // Labels of every alert, as for routing.
    alertLabels: {},
  },

  local config = self._config,
  local addresses = { logs: config.logsUrl, runbooks: without_slash(config.runbookBaseUrl) },
  local with_links(board) = board {
    templating+: {
      list: [
        local own = std.get(addresses, variable.name, '');
        variable + (if own == '' then {} else { query: own })
        for variable in super.list
      ],
    },
  },
  local with_addresses(rule) =
    if !std.objectHas(rule, 'alert') then rule else rule {
      labels+: config.alertLabels,
      annotations+:
        (if config.runbookBaseUrl == '' then {} else {
           local file = std.split(super.runbook_url, '/'),
           runbook_url: without_slash(config.runbookBaseUrl) + '/' + file[std.length(file) - 1],
         })
        + (if config.dashboardBaseUrl == '' then {} else {
             dashboard_url: without_slash(config.dashboardBaseUrl) + super.dashboard_url,
           }),
    },

  prometheusAlerts+:: {
    groups+: [
      group { rules: [with_addresses(rule) for rule in group.rules] }
      for group in
        groups(importstr 'alerts/exporter.yaml')
        + groups(importstr 'alerts/gpus.yaml')
        + groups(importstr 'alerts/jobs.yaml')
        + groups(importstr 'alerts/money.yaml')
    ],
  },

  prometheusRules+:: {
    groups+:
      groups(importstr 'alerts/recording.yaml')
      + groups(importstr 'alerts/recording-days.yaml')
      + groups(importstr 'alerts/recording-fleet.yaml')
      + groups(importstr 'alerts/recording-jobs.yaml')
      + groups(importstr 'alerts/recording-leaks.yaml')
      + groups(importstr 'alerts/recording-owners.yaml')
      + groups(importstr 'alerts/recording-workloads.yaml'),
  },

  grafanaDashboardFolder:: 'GPU efficiency',
  grafanaDashboards+:: {
    'gpu-efficiency-chargeback.json': with_links(import 'dashboards/gpu-efficiency-chargeback.json'),
    'gpu-efficiency-fleet.json': with_links(import 'dashboards/gpu-efficiency-fleet.json'),
    'gpu-efficiency-inference.json': with_links(import 'dashboards/gpu-efficiency-inference.json'),
    'gpu-efficiency-job.json': with_links(import 'dashboards/gpu-efficiency-job.json'),
    'gpu-efficiency-node.json': with_links(import 'dashboards/gpu-efficiency-node.json'),
    'gpu-efficiency-quality.json': with_links(import 'dashboards/gpu-efficiency-quality.json'),
    'gpu-efficiency-training.json': with_links(import 'dashboards/gpu-efficiency-training.json'),
    'gpu-efficiency-zombies.json': with_links(import 'dashboards/gpu-efficiency-zombies.json'),
  },
}

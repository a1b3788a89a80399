{{- /* What cannot work is refused here, in words; types and names are the schema's. */ -}}

{{- define "gpu-efficiency.checks" -}}
{{- include "gpu-efficiency.checks.source" . -}}
{{- include "gpu-efficiency.checks.config" . -}}
{{- include "gpu-efficiency.checks.web" . -}}
{{- include "gpu-efficiency.checks.monitors" . -}}
{{- include "gpu-efficiency.checks.objects" . -}}
{{- if and .Values.cluster.enabled (not (and (eq .Values.scheduler "kubernetes") .Values.kubernetes.api)) -}}
{{- fail "cluster.enabled needs scheduler: kubernetes and kubernetes.api: true: it asks the API server and nobody else" -}}
{{- end -}}
{{- if and (ne .Values.receipts.kubernetes "none") (not (and (eq .Values.scheduler "kubernetes") .Values.kubernetes.api)) -}}
{{- fail (printf "receipts.kubernetes: %s needs scheduler: kubernetes and kubernetes.api: true: the API server is told, and nobody else" .Values.receipts.kubernetes) -}}
{{- end -}}
{{- if and (eq .Values.receipts.kubernetes "annotation") .Values.receipts.admissionPolicy (semverCompare "<1.30-0" .Capabilities.KubeVersion.Version) -}}
{{- fail "receipts.kubernetes: annotation would let the exporter change everything of every pod, and before Kubernetes 1.30 there is no ValidatingAdmissionPolicy to forbid it: take event, or guard pods/patch by a webhook of your own and set receipts.admissionPolicy: false" -}}
{{- end -}}
{{- $surge := dig "rollingUpdate" "maxSurge" 0 .Values.updateStrategy | toString | trimSuffix "%" -}}
{{- if and (eq .Values.updateStrategy.type "RollingUpdate") (ne $surge "0") -}}
{{- fail "updateStrategy.rollingUpdate.maxSurge runs two exporters on a node during an upgrade: both export its figures, which are counted twice, and only one can have a store on hostPath; set maxUnavailable instead" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.hostNetwork -}}
{{- fail "networkPolicy.enabled with hostNetwork: a NetworkPolicy does not hold for pods on the host's network; leave one of them out, and guard the port by the nodes' firewall or by web.config" -}}
{{- end -}}
{{- if and .Values.dashboards.enabled (not .Values.dashboards.sidecar.enabled) (not .Values.dashboards.grafanaOperator.enabled) -}}
{{- fail "dashboards.enabled with neither dashboards.sidecar.enabled nor dashboards.grafanaOperator.enabled: nobody would read the ConfigMaps" -}}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.checks.source" -}}
{{- $v := .Values -}}
{{- if and (eq $v.source "dcgm") (not $v.dcgm.address) -}}
{{- fail "source: dcgm needs dcgm.address: nvidia-dcgm.gpu-operator.svc:5555 for the GPU Operator's host engine (ClusterPolicy dcgm.enabled: true), $(NODE_IP):5555 for one on the host's network (IPv6: [$(NODE_IP)]:5555), or embedded" -}}
{{- end -}}
{{- if and (eq $v.source "dcgm-exporter") (not $v.dcgmExporterUrl) -}}
{{- fail "source: dcgm-exporter needs dcgmExporterUrl, the same node's: http://$(NODE_IP):9400/metrics (IPv6: http://[$(NODE_IP)]:9400/metrics), or the name of a Service with internalTrafficPolicy: Local" -}}
{{- end -}}
{{- if and $v.dcgm.sysAdmin (or (ne $v.dcgm.address "embedded") (has $v.source (list "nvml" "dcgm-exporter"))) -}}
{{- fail "dcgm.sysAdmin is for an embedded engine only (source: dcgm, dcgm.address: embedded): a host engine, dcgm-exporter and GPM have that right themselves or need none" -}}
{{- end -}}
{{- if and $v.serviceAccount.name (eq $v.serviceAccount.name "default") $v.serviceAccount.create -}}
{{- fail "serviceAccount.name: default is every namespace's own; set serviceAccount.create: false to use it" -}}
{{- end -}}
{{- end -}}

{{- /* The environment wins over the file, so what the chart puts there would silently win over config. */ -}}
{{- define "gpu-efficiency.checks.config" -}}
{{- $v := .Values -}}
{{- $ours := dict
  "source" "source" "scheduler" "scheduler" "dcgm.address" "dcgm.address" "dcgm_exporter.url" "dcgmExporterUrl"
  "web.listen_address" "port" "web.config_file" "web.config or web.existingSecret" "privacy.key_file" "privacy.existingSecret"
  "kubernetes.node_name" "nothing, the pod's own node is taken" "kubernetes.api_url" "kubernetes.api"
  "history.file" "history.volume" "receipts.kubernetes" "receipts.kubernetes"
  "reports.socket" "workloads.reportsPath" "engines.enabled" "workloads.engines"
  "cluster.listen_address" "cluster.port" "cluster.scheduler" "nothing, it is kubernetes" -}}
{{- range $path, $instead := $ours -}}
{{- $parts := splitList "." $path -}}
{{- $section := get $v.config (first $parts) -}}
{{- if or (and (eq (len $parts) 1) (hasKey $v.config $path)) (and (kindIs "map" $section) (eq (len $parts) 2) (hasKey ($section | default dict) (last $parts))) -}}
{{- fail (printf "config.%s is set by the chart itself: set %s instead" $path $instead) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (dig "privacy" "users" "" $v.config) "hash") (not $v.privacy.existingSecret) -}}
{{- fail "config.privacy.users: hash needs privacy.existingSecret, a Secret with the key of the hashes" -}}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.checks.web" -}}
{{- $web := .Values.web -}}
{{- if and $web.config $web.existingSecret -}}
{{- fail "web.config and web.existingSecret are two web configurations: give one" -}}
{{- end -}}
{{- if and (or $web.tls $web.clientCertificates) (not $web.existingSecret) -}}
{{- fail "web.tls and web.clientCertificates tell what is in web.existingSecret, and there is none: the chart reads web.config itself" -}}
{{- end -}}
{{- if and $web.clientCertificates (not $web.tls) -}}
{{- fail "web.clientCertificates needs web.tls: client certificates are part of TLS" -}}
{{- end -}}
{{- if and $web.tlsSecret (not (or $web.config $web.existingSecret)) -}}
{{- fail "web.tlsSecret alone does nothing: name its files in web.config.tls_server_config (cert_file: /etc/gpu-efficiency/tls/tls.crt, key_file: /etc/gpu-efficiency/tls/tls.key)" -}}
{{- end -}}
{{- if and $web.tlsSecret (not (include "gpu-efficiency.web.tls" .)) -}}
{{- fail "web.tlsSecret is mounted and nothing reads it: name its files in web.config.tls_server_config, or set web.tls with existingSecret" -}}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.checks.monitors" -}}
{{- $v := .Values -}}
{{- if and $v.podMonitor.enabled $v.serviceMonitor.enabled -}}
{{- fail "podMonitor.enabled and serviceMonitor.enabled: every figure would be there twice; enable one" -}}
{{- end -}}
{{- if and $v.serviceMonitor.enabled (not $v.service.enabled) -}}
{{- fail "serviceMonitor.enabled needs service.enabled: it finds the pods by the Service" -}}
{{- end -}}
{{- range $name := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := get $v $name -}}
{{- if $monitor.enabled -}}
{{- if and (get $v.web.config "basic_auth_users") (not $monitor.basicAuth) -}}
{{- fail (printf "web.config.basic_auth_users asks for a password and %s.basicAuth has none: name the Secret with username and password" $name) -}}
{{- end -}}
{{- if and (include "gpu-efficiency.web.clientCertificates" $) (not (get $monitor.tlsConfig "cert")) -}}
{{- fail (printf "client certificates are asked for and %s.tlsConfig has none: give cert and keySecret" $name) -}}
{{- end -}}
{{- if and (include "gpu-efficiency.web.tls" $) (not $monitor.tlsConfig) (not (include "gpu-efficiency.ownTrust" (list $ $monitor))) -}}
{{- fail (printf "the exporter speaks TLS and %s.tlsConfig says nothing of whom to trust: give ca and serverName (or insecureSkipVerify: true)" $name) -}}
{{- end -}}
{{- if and (eq $monitor.scheme "http") (include "gpu-efficiency.web.tls" $) -}}
{{- fail (printf "%s.scheme: http, and the exporter speaks TLS: leave it empty" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.checks.objects" -}}
{{- range $where, $resources := dict "resources" .Values.resources "cluster.resources" .Values.cluster.resources -}}
{{- range $part, $amounts := $resources -}}
{{- range $name, $_ := $amounts -}}
{{- if and (kindIs "string" $name) (hasPrefix "nvidia.com/" $name) -}}
{{- fail (printf "%s.%s: %s would take a GPU away from those that the exporter watches; it sees all of them without" $where $part $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ours := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart" -}}
{{- $v := .Values -}}
{{- $given := dict "commonLabels" $v.commonLabels "podLabels" $v.podLabels "cluster.podLabels" $v.cluster.podLabels "podMonitor.labels" $v.podMonitor.labels "serviceMonitor.labels" $v.serviceMonitor.labels "rules.labels" $v.rules.labels "dashboards.labels" $v.dashboards.labels -}}
{{- range $where, $labels := $given -}}
{{- range $name, $_ := $labels -}}
{{- if has $name $ours -}}{{- fail (printf "%s: the chart sets %s itself: it selects the pods by it" $where $name) -}}{{- end -}}
{{- if and (hasKey $v.commonLabels $name) (ne $where "commonLabels") -}}{{- fail (printf "%s: commonLabels has %s already" $where $name) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

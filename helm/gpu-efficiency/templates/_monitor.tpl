{{- /* One endpoint of a PodMonitor or ServiceMonitor, and limits of all of them: (root, monitor's values, port's name). */ -}}

{{- define "gpu-efficiency.endpoint" -}}
{{- $root := index . 0 -}}{{- $monitor := index . 1 -}}{{- $port := index . 2 -}}
{{- $scheme := $monitor.scheme | default (include "gpu-efficiency.web.scheme" $root) -}}
- port: {{ $port }}
  path: /metrics
  scheme: {{ $scheme }}
  honorLabels: {{ $monitor.honorLabels }}
  {{- with $monitor.interval }}
  interval: {{ . }}
  {{- end }}
  {{- with $monitor.scrapeTimeout }}
  scrapeTimeout: {{ . }}
  {{- end }}
  {{- if eq $scheme "https" }}
  {{- $trust := $monitor.tlsConfig -}}
  {{- if include "gpu-efficiency.ownTrust" (list $root $monitor) }}
  {{- $name := printf "%s.%s.svc" (include "gpu-efficiency.fullname" $root) (include "gpu-efficiency.namespace" $root) -}}
  {{- $ca := dict "ca" (dict "secret" (dict "name" $root.Values.web.tlsSecret "key" "ca.crt")) -}}
  {{- if or (get $trust "ca") (get $trust "insecureSkipVerify") -}}{{- $ca = dict -}}{{- end -}}
  {{- $trust = merge (deepCopy $trust) $ca (dict "serverName" $name) -}}
  {{- end }}
  {{- with $trust }}
  tlsConfig:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $monitor.basicAuth }}
  basicAuth:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  relabelings:
    {{- if eq $port "metrics" }}
    - sourceLabels: [__meta_kubernetes_pod_node_name]
      targetLabel: instance
    {{- else }}
    - targetLabel: instance
      replacement: {{ include "gpu-efficiency.named" (list $root "-cluster") }}
    {{- end }}
    {{- with $monitor.relabelings }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $monitor.metricRelabelings }}
  metricRelabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* "true" where the ca.crt of web.tlsSecret may be trusted: a monitor reads Secrets of its own namespace only. */ -}}
{{- define "gpu-efficiency.ownTrust" -}}
{{- $root := index . 0 -}}{{- $monitor := index . 1 -}}
{{- if and $root.Values.web.tlsSecret (has $monitor.namespace (list "" (include "gpu-efficiency.namespace" $root))) -}}true{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.limits" -}}
{{- if .sampleLimit }}
sampleLimit: {{ int64 .sampleLimit }}
{{- end }}
{{- if .labelLimit }}
labelLimit: {{ int64 .labelLimit }}
{{- end }}
{{- end -}}

{{- /* A monitor elsewhere than its pods must say where they are. */ -}}
{{- define "gpu-efficiency.monitor" -}}
{{- $root := index . 0 -}}{{- $monitor := index . 1 -}}{{- $cluster := index . 2 -}}
{{- $labels := ternary "gpu-efficiency.cluster.labels" "gpu-efficiency.labels" $cluster -}}
metadata:
  name: {{ ternary (include "gpu-efficiency.named" (list $root "-cluster")) (include "gpu-efficiency.fullname" $root) $cluster }}
  namespace: {{ $monitor.namespace | default (include "gpu-efficiency.namespace" $root) }}
  labels:
    {{- include $labels $root | nindent 4 }}
    {{- with $monitor.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with $monitor.podTargetLabels }}
  podTargetLabels:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $monitor.namespace (ne $monitor.namespace (include "gpu-efficiency.namespace" $root)) }}
  namespaceSelector:
    matchNames:
      - {{ include "gpu-efficiency.namespace" $root }}
  {{- end }}
  selector:
    matchLabels:
      {{- include (ternary "gpu-efficiency.cluster.selector" "gpu-efficiency.selector" $cluster) $root | nindent 6 }}
  {{- with include "gpu-efficiency.limits" $monitor | trim }}{{- . | nindent 2 }}{{- end }}
{{- end -}}

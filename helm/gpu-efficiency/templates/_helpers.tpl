{{- /* Names, labels, the image; and values that an older release did not know. */ -}}

{{- /*
`helm upgrade --reuse-values` brings the values of the older chart, in which this one's new keys are absent. Every
template begins with this, which fills them in from values.yaml; so nothing else needs a default. What the first version
had with a default that may be taken away by null stays away.
*/ -}}
{{- define "gpu-efficiency.defaults" -}}
{{- $_ := include "gpu-efficiency.whole" (list . "files/defaults.yaml" "image") -}}
{{- include "gpu-efficiency.fill" (list .Values (.Files.Get "files/defaults.yaml" | fromYaml)) -}}
{{- include "gpu-efficiency.checks" . -}}
{{- end -}}

{{- /*
In a checkout the files that the chart shares with the rest of the project are symbolic links. A tool that leaves them
out, or writes their text (Git where core.symlinks is false), must not give a chart that silently has no rules.
(root, pattern of the files, key that each of them has.)
*/ -}}
{{- define "gpu-efficiency.whole" -}}
{{- $pattern := index . 1 -}}{{- $key := index . 2 -}}
{{- $lack := printf "%s: this copy of the chart lacks them: they are symbolic links in a checkout, and whatever copied it left them out or did not follow them; install a packaged chart (helm package, in a full checkout)" $pattern -}}
{{- $files := (index . 0).Files.Glob $pattern -}}
{{- range $path, $text := $files -}}
{{- if not (contains $key (toString $text)) -}}{{- fail $lack -}}{{- end -}}
{{- else -}}
{{- fail $lack -}}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.fill" -}}
{{- $have := index . 0 -}}
{{- range $key, $default := index . 1 -}}
{{- if not (hasKey $have $key) -}}
{{- if not (has $key (list "nodeSelector" "tolerations" "resources")) -}}{{- $_ := set $have $key $default -}}
{{- else -}}{{- $_ := set $have $key (ternary (list) (dict) (kindIs "slice" $default)) -}}{{- end -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $have $key)) -}}
{{- if not (has $key (list "nodeSelector" "resources")) -}}
{{- include "gpu-efficiency.fill" (list (get $have $key) $default) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 55 | trimSuffix "-" -}}
{{- end -}}

{{- define "gpu-efficiency.fullname" -}}
{{- $name := include "gpu-efficiency.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- /* The name with an ending, within the 63 letters that a label's value may have. */ -}}
{{- define "gpu-efficiency.named" -}}
{{- $ending := index . 1 -}}
{{ include "gpu-efficiency.fullname" (index . 0) | trunc (int (sub 63 (len $ending))) | trimSuffix "-" }}{{ $ending }}
{{- end -}}

{{- define "gpu-efficiency.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end -}}

{{- define "gpu-efficiency.selector" -}}
app.kubernetes.io/name: {{ include "gpu-efficiency.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* Not the exporters' own labels, or their Service and PodMonitor would take it for one of them. */ -}}
{{- define "gpu-efficiency.cluster.selector" -}}
app.kubernetes.io/name: {{ include "gpu-efficiency.name" . }}-cluster
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gpu-efficiency.about" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "gpu-efficiency.labels" -}}
{{ include "gpu-efficiency.selector" . }}
{{ include "gpu-efficiency.about" . }}
{{- end -}}

{{- define "gpu-efficiency.cluster.labels" -}}
{{ include "gpu-efficiency.cluster.selector" . }}
{{ include "gpu-efficiency.about" . }}
{{- end -}}

{{- define "gpu-efficiency.image" -}}
{{- $repository := required "image.repository is empty and no image is published: build one from the Dockerfile, push it and name it" .Values.image.repository -}}
{{- with .Values.global.imageRegistry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" $repository "") -}}
{{- end -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "gpu-efficiency.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.cluster.serviceAccountName" -}}
{{ .Values.cluster.serviceAccount.name | default (include "gpu-efficiency.named" (list . "-cluster")) }}
{{- end -}}

{{- /* One of two maps over the other, key by key; an empty text takes a key away. */ -}}
{{- define "gpu-efficiency.over" -}}
{{- $whole := index . 1 -}}
{{- range $key, $value := index . 0 -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $whole $key -}}
{{- else if and (kindIs "string" $value) (eq (toString $value) "") -}}{{- $_ := unset $whole $key -}}
{{- else -}}{{- $_ := set $whole $key $value -}}{{- end -}}
{{- end -}}
{{- toYaml $whole -}}
{{- end -}}
